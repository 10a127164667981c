// Products of int8 activations with a panel of codes: integers within a group, floats beyond it.
//
// The sums of up to 32 inputs of a group begin with what an offset subtracts, and are multiplied by the group's scale
// and by that of the inputs. All numbers of rows have the same arithmetic: a row's products do not depend on its
// neighbours. Tiles of AMX take the values of the codes instead, widened to bf16 once for many rows.
#include <algorithm>
#include <utility>

#include "packed.h"

namespace eventlm {

namespace {

// How integers are multiplied: codes of up to BITS bits, unsigned, with signed inputs, four of them a word.
#if defined(__AVX512VNNI__)

template <int BITS>
struct Dot {
  using Partial = i32xn;
  // Pairs of quads whose products are added before they are added to a group's sums.
  static constexpr int kPairs = 4;

  static EVENTLM_INLINE Partial begin(i32xn sums) { return sums; }
  static EVENTLM_INLINE Partial add(Partial sums, u32xn codes, u32xn inputs) {
    return (i32xn)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, (__m512i)inputs);
  }
  static EVENTLM_INLINE i32xn end(i32xn, Partial sums) { return sums; }
};

#else

// Bytes are widened, the even ones and the odd ones.
template <int BITS>
struct Dot {
  using Partial = i32xn;
  static constexpr int kPairs = 4;

  static EVENTLM_INLINE Partial begin(i32xn sums) { return sums; }
  static EVENTLM_INLINE Partial add(Partial sums, u32xn codes, u32xn inputs) {
    const u32xn even = (u32xn)((i16xn)((i16xn)inputs << 8) >> 8), odd = (u32xn)((i16xn)inputs >> 8);
    sums = dot_int16_pairs(sums, codes & 0x00ff00ffu, even);
    return dot_int16_pairs(sums, (codes >> 8) & 0x00ff00ffu, odd);
  }
  static EVENTLM_INLINE i32xn end(i32xn, Partial sums) { return sums; }
};

#if defined(__AVX2__)

// As many pairs of products as 16 bits have room for.
template <int BITS>
  requires(BITS < 8)
struct Dot<BITS> {
  using Partial = i16xn;
  static constexpr int kPairs = BITS == 4 ? 4 : BITS == 5 ? 2 : 1;

  static EVENTLM_INLINE Partial begin(i32xn) { return Partial{}; }
  static EVENTLM_INLINE Partial add(Partial sums, u32xn codes, u32xn inputs) {
    return sums + (i16xn)_mm256_maddubs_epi16((__m256i)codes, (__m256i)inputs);
  }
  static EVENTLM_INLINE i32xn end(i32xn sums, Partial partial) {
    return dot_int16_pairs(sums, (u32xn)partial, u32xn{} + 0x00010001u);
  }
};

#endif
#endif

// What each byte of codes stands for in a table.
EVENTLM_INLINE u32xn look_up(const std::uint8_t* table, u32xn codes) {
#if defined(__AVX512BW__)
  return (u32xn)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load<__m128i>(table)), (__m512i)codes);
#elif defined(__AVX2__)
  return (u32xn)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load<__m128i>(table)), (__m256i)codes);
#elif !defined(__clang__)
  return (u32xn)__builtin_shuffle(load<u8x16>(table), (u8x16)codes);
#else
  std::uint8_t bytes[sizeof codes];
  store(bytes, codes);
  for (std::uint8_t& byte : bytes) byte = table[byte];
  return load<u32xn>(bytes);
#endif
}

template <int BY>
EVENTLM_INLINE u32xn shift_left(u32xn words) {
  if constexpr (BY >= 0) return words << BY;
  return words >> -BY;
}

// The codes of quads 2 * PAIR and the next of some columns; `from` the first word of theirs.
template <Format FORMAT, int PAIR>
EVENTLM_INLINE void get_codes(const std::uint8_t* from, u32xn& first, u32xn& second) {
  constexpr int kRest = FORMAT.bits - 4;
  if constexpr (FORMAT.bits == 8) {
    first = load<u32xn>(from + 2 * PAIR * kWordsBytes);
    second = load<u32xn>(from + (2 * PAIR + 1) * kWordsBytes);
    return;
  }
  const u32xn nibbles = load<u32xn>(from + PAIR * kWordsBytes);
  first = nibbles & 0x0f0f0f0fu;
  second = (nibbles >> 4) & 0x0f0f0f0fu;
  if constexpr (kRest > 0 && kRest < 4) {
    constexpr std::uint32_t kMask = (0x10101010u << kRest) - 0x10101010u;
    const u32xn rest = load<u32xn>(from + FORMAT.group / 8 * kWordsBytes);
    first |= shift_left<4 - 2 * PAIR * kRest>(rest) & kMask;
    second |= shift_left<4 - (2 * PAIR + 1) * kRest>(rest) & kMask;
  }
  if constexpr (FORMAT.table != Table::none) {
    constexpr const std::uint8_t* kTable = kTables[static_cast<int>(FORMAT.table)];
    first = look_up(kTable, first);
    second = look_up(kTable, second);
  }
}

// Numbers of some columns, scales or minima, as floats.
template <Format FORMAT>
EVENTLM_INLINE f32xn get_floats(const std::uint8_t* from, f32xn above) {
  if constexpr (FORMAT.scales == Scales::floats) return load<f32xn>(from);
  if constexpr (FORMAT.scales == Scales::halves) return load_halves(from);
  if constexpr (FORMAT.scales == Scales::powers) {
    const u32xn powers = (u32xn)widened(load<u8xn>(from));
    const u32xn bits = powers < 2 ? 0x200000u << (powers & 1) : (powers - 1) << 23;
    return (f32xn)bits;
  }
  if constexpr (FORMAT.scales == Scales::bytes) return to_floats(widened(load<u8xn>(from))) * above;
  return to_floats(widened(load<s8xn>(from))) * above;
}

// The scales of some columns, which begin with number `at` of a span's, and what is subtracted from their values.
template <Format FORMAT>
EVENTLM_INLINE void get_scales(const std::uint8_t* span, std::size_t at, f32xn above, f32xn above_minima, f32xn& scale,
                               f32xn& minimum) {
  scale = get_floats<FORMAT>(span + FORMAT.first_scale() + FORMAT.scale_bytes() / kPanel * at, above);
  if constexpr (FORMAT.has_minima) {
    const std::uint8_t* from = span + FORMAT.first_minimum() + FORMAT.minimum_bytes() / kPanel * at;
    if constexpr (FORMAT.scales == Scales::floats) {
      minimum = load_halves(from) * scale;
    } else {
      minimum = get_floats<FORMAT>(from, above_minima);
      if constexpr (FORMAT.scales == Scales::halves) minimum = -minimum;
    }
  }
}

constexpr int log2_of(int power) { return power == 1 ? 0 : 1 + log2_of(power / 2); }

// The widest of codes as they are multiplied.
constexpr int bits_of(Format format) {
  return format.table == Table::none ? format.bits : format.table == Table::fp4 ? 5 : 8;
}

// Calls work<0>(), work<1>() and so on.
template <int COUNT, class Work>
EVENTLM_INLINE void unrolled(Work&& work) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (work.template operator()<I>(), ...);
  }(std::make_integer_sequence<int, COUNT>{});
}

// ROWS rows times COLUMNS vectors of columns of a panel, from `first` on.
template <Format FORMAT, int ROWS, int COLUMNS>
[[gnu::noinline]] void multiply_columns(const std::uint8_t* panel, std::size_t num_in, const Line* line, int first,
                                        LinesAhead ahead, float (*out)[kPanel]) {
  using Product = Dot<bits_of(FORMAT)>;
  // A large group is multiplied in parts.
  constexpr int kGroup = FORMAT.group, kGroups = kPackedInputs / kGroup, kPart = std::min(kGroup, 32);
  constexpr int kPairs = kPart / 8, kParts = kGroup / kPart;
  constexpr int kAtOnce = std::min(Product::kPairs, kPairs);
  constexpr std::size_t kPartBytes = FORMAT.code_bytes() / kParts;
  constexpr std::size_t kLinesAhead = (FORMAT.span_bytes() / FORMAT.groups() / kParts + kLineBytes - 1) / kLineBytes;
  constexpr std::size_t kBlocksOfSpan = std::max<std::size_t>(FORMAT.span() / kPackedInputs, 1);
  f32xn sums[ROWS][COLUMNS] = {};
  const std::uint8_t* span = panel;
  for (std::size_t input = 0; input < num_in; input += kPackedInputs, line += kPackedLines * kTileRows) {
    const std::size_t block = input / kPackedInputs % kBlocksOfSpan;
    const int num_parts = static_cast<int>(std::min(num_in - input, kPackedInputs)) / kPart;
    const PackedScale* ends = reinterpret_cast<const PackedScale*>(line + 2 * kTileRows);
    f32xn above[COLUMNS], above_minima[COLUMNS];
    for (int c = 0; c < COLUMNS && FORMAT.is_nested(); c++) {
      above[c] = load_halves(span + 2 * (first + c * kNative));
      if (FORMAT.has_minima) above_minima[c] = load_halves(span + 2 * (kPanel + first + c * kNative));
    }
    for (int part = 0; part < num_parts; part++) {
      const int group = part / kParts;
      const std::size_t number = FORMAT.groups() > 1 ? block * kGroups + group : 0;
      const auto minus_sum = [&](int r) __attribute__((always_inline)) {
        return i32xn{} + (kPart == 32 ? ends[r].of_32 : ends[r].of_16)[part];
      };
      i32xn ints[ROWS][COLUMNS] = {};
      for (int r = 0; r < ROWS && FORMAT.offset != 0; r++) {
        for (int c = 0; c < COLUMNS; c++) ints[r][c] = minus_sum(r) << log2_of(FORMAT.offset);
      }
      for (std::size_t i = 0; i < kLinesAhead; i++, ahead.bytes += ahead.step) __builtin_prefetch(ahead.bytes, 0, 2);
      const std::uint8_t* codes =
          span + FORMAT.first_code() + number * FORMAT.code_bytes() + part % kParts * kPartBytes + 4 * first;
      const int at = part * kPart;
      const std::uint32_t* inputs = line[at / 64 * kTileRows].words + at / 4 % kLanes;
      unrolled<kPairs / kAtOnce>([&]<int PART>() __attribute__((always_inline)) {
        typename Product::Partial partial[ROWS][COLUMNS];
        for (int r = 0; r < ROWS; r++) {
          for (int c = 0; c < COLUMNS; c++) partial[r][c] = Product::begin(ints[r][c]);
        }
        unrolled<kAtOnce>([&]<int AT>() __attribute__((always_inline)) {
          constexpr int kPair = PART * kAtOnce + AT;
          u32xn even[COLUMNS], odd[COLUMNS];
#pragma GCC unroll 8
          for (int c = 0; c < COLUMNS; c++) get_codes<FORMAT, kPair>(codes + 4 * kNative * c, even[c], odd[c]);
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; r++) {
            const u32xn even_inputs = u32xn{} + inputs[r * kLanes + 2 * kPair];
            const u32xn odd_inputs = u32xn{} + inputs[r * kLanes + 2 * kPair + 1];
#pragma GCC unroll 8
            for (int c = 0; c < COLUMNS; c++) {
              partial[r][c] = Product::add(partial[r][c], even[c], even_inputs);
              partial[r][c] = Product::add(partial[r][c], odd[c], odd_inputs);
            }
          }
        });
        for (int r = 0; r < ROWS; r++) {
          for (int c = 0; c < COLUMNS; c++) ints[r][c] = Product::end(ints[r][c], partial[r][c]);
        }
      });
      f32xn scales[COLUMNS], minima[COLUMNS];
      const std::size_t at_group = number * kPanel + first;
#pragma GCC unroll 8
      for (int c = 0; c < COLUMNS; c++) {
        get_scales<FORMAT>(span, at_group + c * kNative, above[c], above_minima[c], scales[c], minima[c]);
      }
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        const f32xn input_scale = f32xn{} + ends[r].scales[part * kPart / 32];
        const f32xn minus = to_floats(minus_sum(r)) * input_scale;
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; c++) {
          sums[r][c] += to_floats(ints[r][c]) * (scales[c] * input_scale);
          if (FORMAT.has_minima) sums[r][c] += minus * minima[c];
        }
      }
      if (FORMAT.groups() == 1 && part % kParts == kParts - 1) span += FORMAT.span_bytes();
    }
    if constexpr (FORMAT.groups() > 1) {
      if (block + 1 == kBlocksOfSpan) span += FORMAT.span_bytes();
    }
  }
  for (int r = 0; r < ROWS; r++) {
    for (int c = 0; c < COLUMNS; c++) store(out[r] + first + c * kNative, sums[r][c]);
  }
}

// Vectors of columns that are as many sums as registers have room for.
constexpr int columns_of(int rows) { return kNative == 16 ? 2 : rows == 4 ? 2 : 4; }

template <Format FORMAT, int ROWS>
void multiply_rows(const PackedMatrix& matrix, std::size_t panel, const Line* line, LinesAhead ahead,
                   float (*out)[kPanel]) {
  constexpr int kColumns = columns_of(ROWS);
  for (int first = 0; first < kPanel; first += kColumns * kNative) {
    multiply_columns<FORMAT, ROWS, kColumns>(matrix.panel(panel), matrix.num_in, line, first, ahead, out);
  }
}

template <Format FORMAT>
void multiply_format(const PackedMatrix& matrix, std::size_t panel, const Line* line, int count, LinesAhead ahead,
                     float (*out)[kPanel]) {
  if (count == 1) return multiply_rows<FORMAT, 1>(matrix, panel, line, ahead, out);
  if (count == 2) return multiply_rows<FORMAT, 2>(matrix, panel, line, ahead, out);
  multiply_rows<FORMAT, 4>(matrix, panel, line, ahead, out);
}

// Vectors of a panel's columns, and rows whose sums of them are registers.
constexpr int kVectors = kPanel / kNative, kFloatRows = kNative == 16 ? 8 : 2;
constexpr std::size_t kInputPairs = kPackedInputs / 2;
constexpr std::size_t kFloatBytesAhead = 8192;

// Pairs of E4M3 of some columns as pairs of bf16, 1/256 of what they are: an fp16 has its small numbers too.
EVENTLM_INLINE u32xn widen_float8(const std::uint8_t* from) {
  const s16xn pairs = load<s16xn>(from), keep = s16xn{} + static_cast<std::int16_t>(0xbf80);
  const s16xn even = ((s16xn)(pairs << 8) >> 1) & keep, odd = (pairs >> 1) & keep;
  return (u32xn)load_halves(&even) >> 16 | ((u32xn)load_halves(&odd) & 0xffff0000u);
}

#if defined(__AMX_BF16__)

// The values of a quad of each column, as pairs.
EVENTLM_INLINE void widen_quad(u32xn codes, f32xn scale, f32xn shift, std::uint32_t* to) {
  const auto value = [&](int byte) __attribute__((always_inline)) {
    return to_floats((i32xn)(codes >> 8 * byte & 0xff)) * scale + shift;
  };
  store(to, bf16_pairs(value(0), value(1)));
  store(to + kPanel, bf16_pairs(value(2), value(3)));
}

template <Format FORMAT>
void widen_columns(const PackedMatrix& matrix, const std::uint8_t* span, int first, std::uint32_t* to) {
  constexpr std::size_t kPart = std::min(FORMAT.group, 32), kParts = FORMAT.group / kPart;
  constexpr std::size_t kSpanParts = FORMAT.span() / kPart;
  for (std::size_t input = 0; input < matrix.num_in; input += FORMAT.span(), span += FORMAT.span_bytes()) {
    const f32xn above = load_halves(span + 2 * first), above_minima = load_halves(span + 2 * (kPanel + first));
    const std::uint8_t* codes = span + FORMAT.first_code() + FORMAT.code_step() * first;
    const std::size_t num_parts = std::min((matrix.num_in - input) / kPart, kSpanParts);
    for (std::size_t part = 0; part < num_parts; part++, codes += FORMAT.code_bytes() / kParts) {
      f32xn scale, minimum = {};
      get_scales<FORMAT>(span, part / kParts * kPanel + first, above, above_minima, scale, minimum);
      if constexpr (FORMAT.is_float8()) {
        for (std::size_t pair = 0; pair < kPart / 2; pair++, to += kPanel) {
          const u32xn values = widen_float8(codes + 2 * kPanel * pair);
          store(to, bf16_pairs((f32xn)(values << 16) * scale, (f32xn)(values & 0xffff0000u) * scale));
        }
      } else {
        const f32xn shift = -minimum - scale * static_cast<float>(FORMAT.offset);
        unrolled<kPart / 8>([&]<int PAIR>() __attribute__((always_inline)) {
          u32xn even, odd;
          get_codes<FORMAT, PAIR>(codes, even, odd);
          widen_quad(even, scale, shift, to);
          widen_quad(odd, scale, shift, to + 2 * kPanel);
          to += 4 * kPanel;
        });
      }
    }
  }
}

#endif

// Adds the products of ROWS rows with `num_pairs` pairs of inputs, a multiple of 16.
template <int ROWS>
void add_float8(const std::uint32_t (*weights)[kPanel], std::size_t num_pairs, const std::uint32_t* inputs,
                const float* scales, float (*out)[kPanel]) {
  f32xn sums[ROWS][kVectors] = {};
  for (std::size_t pair = 0; pair < num_pairs; pair++) {
    const std::uint32_t* words = inputs + pair / kLanes * (kTileRows * kLanes) + pair % kLanes;
    u32xn columns[kVectors];
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; c++) columns[c] = load<u32xn>(weights[pair] + c * kNative);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      const u32xn input = in_all_lanes(words[r * kLanes]);
#pragma GCC unroll 8
      for (int c = 0; c < kVectors; c++) sums[r][c] = dot_pairs(sums[r][c], columns[c], input);
    }
  }
  for (int r = 0; r < ROWS; r++) {
    for (int c = 0; c < kVectors; c++) {
      float* to = out[r] + c * kNative;
      store(to, load<f32xn>(to) + sums[r][c] * load<f32xn>(scales + c * kNative));
    }
  }
}

}  // namespace

void multiply_float8(const PackedMatrix& matrix, std::size_t panel, const Rows& rows, int row, int count,
                     float (*sums)[kPanel]) {
  constexpr Format kFormat = format_of(PackedType::f8_128);
  alignas(64) std::uint32_t weights[kInputPairs][kPanel];
  const std::uint8_t* span = matrix.panel(panel);
  std::fill_n(sums[0], static_cast<std::size_t>(count + kFloatRows - 1) / kFloatRows * kFloatRows * kPanel, 0.0f);
  for (std::size_t input = 0; input < matrix.num_in; input += kPackedInputs, span += kFormat.span_bytes()) {
    const std::size_t num_pairs = std::min(matrix.num_in - input, kPackedInputs) / 2;
    const std::uint8_t* codes = span + kFormat.first_code();
    for (std::size_t pair = 0; pair < num_pairs; pair++, codes += 2 * kPanel) {
      __builtin_prefetch(codes + kFloatBytesAhead, 0, 2);
      for (int c = 0; c < kVectors; c++) store(weights[pair] + c * kNative, widen_float8(codes + 2 * c * kNative));
    }
    const float* scales = reinterpret_cast<const float*>(span);
    for (int r = 0; r < count; r += kFloatRows) {
      const std::uint32_t* inputs = rows.row(row + r) + input / kTileInputs * (kTileRows * kLanes);
      if (count - r == 1) {
        add_float8<1>(weights, num_pairs, inputs, scales, sums + r);
      } else {
        add_float8<kFloatRows>(weights, num_pairs, inputs, scales, sums + r);
      }
    }
  }
}

namespace {

// Calls work<TYPE>() for a type of integers.
template <class Work>
void with_type(PackedType type, Work&& work) {
  using enum PackedType;
  switch (type) {
#define EVENTLM_CASE(TYPE) \
  case TYPE:               \
    return work.template operator()<TYPE>()
    EVENTLM_CASE(q4_0);
    EVENTLM_CASE(q4_1);
    EVENTLM_CASE(q5_0);
    EVENTLM_CASE(q5_1);
    EVENTLM_CASE(q8_0);
    EVENTLM_CASE(q2_k);
    EVENTLM_CASE(q3_k);
    EVENTLM_CASE(q4_k);
    EVENTLM_CASE(q5_k);
    EVENTLM_CASE(q6_k);
    EVENTLM_CASE(iq4_nl);
    EVENTLM_CASE(iq4_xs);
    EVENTLM_CASE(mxfp4);
    EVENTLM_CASE(i4_32);
    EVENTLM_CASE(i4_128);
    EVENTLM_CASE(i8_32);
    EVENTLM_CASE(i8_128);
    case f8_128:
    case none:
      break;
#undef EVENTLM_CASE
  }
}

}  // namespace

void multiply_packed(const PackedMatrix& matrix, std::size_t panel, const Rows& rows, int row, int count,
                     LinesAhead ahead, float (*sums)[kPanel]) {
  with_type(matrix.type, [&]<PackedType TYPE>() {
    multiply_format<format_of(TYPE)>(matrix, panel, rows.packed_row(row), count, ahead, sums);
  });
}

#if defined(__AMX_BF16__)

void widen_packed(const PackedMatrix& matrix, std::size_t panel, int first, std::uint32_t* to) {
  const std::uint8_t* from = matrix.panel(panel);
  if (matrix.is_float8()) return widen_columns<format_of(PackedType::f8_128)>(matrix, from, first, to);
  with_type(matrix.type, [&]<PackedType TYPE>() { widen_columns<format_of(TYPE)>(matrix, from, first, to); });
}

#endif

}  // namespace eventlm
