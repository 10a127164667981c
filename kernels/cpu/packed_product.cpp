// Products of int8 activations with a panel of codes: integers within a group, floats beyond it.
//
// The sums of a group begin with what an offset subtracts, are multiplied by the group's scales, and added up for 128
// inputs, which have one scale in a row. All numbers of rows have the same arithmetic: a row's products do not depend
// on its neighbours.
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

// The scales, or minima, of some columns, as floats.
template <Format FORMAT>
EVENTLM_INLINE f32xn get_scales(const std::uint8_t* from, f32xn above) {
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
  constexpr int kScaleBytes = FORMAT.scale_bytes() / kPanel, kMinimumBytes = FORMAT.minimum_bytes() / kPanel;
  constexpr std::size_t kPartBytes = FORMAT.code_bytes() / kParts;
  constexpr std::size_t kLinesAhead = (FORMAT.span_bytes() / FORMAT.groups() / kParts + kLineBytes - 1) / kLineBytes;
  constexpr std::size_t kBlocksOfSpan = std::max<std::size_t>(FORMAT.span() / kPackedInputs, 1);
  f32xn totals[ROWS][COLUMNS] = {};
  const std::uint8_t* span = panel;
  for (std::size_t input = 0; input < num_in; input += kPackedInputs, line += kPackedLines * kTileRows) {
    const std::size_t block = input / kPackedInputs % kBlocksOfSpan;
    const int num_groups = (static_cast<int>(std::min(num_in - input, kPackedInputs)) + kGroup - 1) / kGroup;
    const PackedScale* ends = reinterpret_cast<const PackedScale*>(line + 2 * kTileRows);
    f32xn above[COLUMNS], above_minima[COLUMNS];
    for (int c = 0; c < COLUMNS && FORMAT.is_nested(); c++) {
      above[c] = load_halves(span + 2 * (first + c * kNative));
      if (FORMAT.has_minima) above_minima[c] = load_halves(span + 2 * (kPanel + first + c * kNative));
    }
    f32xn sums[ROWS][COLUMNS] = {};
    for (int group = 0; group < num_groups; group++) {
      const std::size_t number = FORMAT.groups() > 1 ? block * kGroups + group : 0;
      const auto minus_sum = [&](int r) __attribute__((always_inline)) {
        if constexpr (kGroup == 128) {
          const std::int32_t* of_32 = ends[r].of_32;
          return i32xn{} + (of_32[0] + of_32[1] + of_32[2] + of_32[3]);
        }
        return i32xn{} + (kGroup == 32 ? ends[r].of_32 : ends[r].of_16)[group];
      };
      i32xn ints[ROWS][COLUMNS] = {};
      for (int r = 0; r < ROWS && FORMAT.offset != 0; r++) {
        for (int c = 0; c < COLUMNS; c++) ints[r][c] = minus_sum(r) << log2_of(FORMAT.offset);
      }
      for (int part = 0; part < kParts; part++) {
        for (std::size_t i = 0; i < kLinesAhead; i++, ahead.bytes += ahead.step) __builtin_prefetch(ahead.bytes, 0, 2);
        const std::uint8_t* codes =
            span + FORMAT.first_code() + number * FORMAT.code_bytes() + part * kPartBytes + 4 * first;
        const int at = group * kGroup + part * kPart;
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
      }
#pragma GCC unroll 8
      for (int c = 0; c < COLUMNS; c++) {
        const std::uint8_t* scales = span + number * FORMAT.scale_bytes() + kScaleBytes * (first + c * kNative);
        const f32xn scale = get_scales<FORMAT>(scales + FORMAT.first_scale(), above[c]);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) sums[r][c] += to_floats(ints[r][c]) * scale;
        if constexpr (FORMAT.has_minima) {
          const std::uint8_t* minima =
              span + FORMAT.first_minimum() + number * FORMAT.minimum_bytes() + kMinimumBytes * (first + c * kNative);
          const f32xn minimum = FORMAT.scales == Scales::floats ? load_halves(minima) * scale
                                                                : get_scales<FORMAT>(minima, above_minima[c]);
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; r++) {
            const f32xn part = to_floats(minus_sum(r)) * minimum;
            FORMAT.scales == Scales::halves ? sums[r][c] -= part : sums[r][c] += part;
          }
        }
      }
      if constexpr (FORMAT.groups() == 1) span += FORMAT.span_bytes();
    }
    if constexpr (FORMAT.groups() > 1) {
      if (block + 1 == kBlocksOfSpan) span += FORMAT.span_bytes();
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 8
      for (int c = 0; c < COLUMNS; c++) totals[r][c] += sums[r][c] * ends[r].scale;
    }
  }
  for (int r = 0; r < ROWS; r++) {
    for (int c = 0; c < COLUMNS; c++) store(out[r] + first + c * kNative, totals[r][c]);
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

void multiply_packed(const PackedMatrix& matrix, std::size_t panel, const Rows& rows, int row, int count,
                     LinesAhead ahead, float (*sums)[kPanel]) {
  const auto multiply = [&]<PackedType TYPE>() {
    multiply_format<format_of(TYPE)>(matrix, panel, rows.packed_row(row), count, ahead, sums);
  };
  using enum PackedType;
  switch (matrix.type) {
#define EVENTLM_CASE(TYPE) \
  case TYPE:               \
    return multiply.template operator()<TYPE>()
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

}  // namespace eventlm
