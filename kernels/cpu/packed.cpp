#include "packed.h"

#include <algorithm>
#include <cstring>

namespace eventlm {

namespace {

// A block of a file; scales, and minima, are of groups or, as floats, fp16 and E8M0, of all of it.
struct Block {
  std::uint8_t codes[256];
  float factor;
  std::uint16_t scale, minimum;
  std::uint8_t scales[16], minima[16];
};

std::uint16_t half_at(const std::uint8_t* from) { return load<std::uint16_t>(from); }

// `count` codes after one another of each of `num_parts` parts of bytes, the lowest first.
void read_parts(std::uint8_t* codes, const std::uint8_t* from, int count, int num_parts) {
  const int bits = 8 / num_parts, mask = (1 << bits) - 1;
  for (int part = 0; part < num_parts; part++) {
    for (int i = 0; i < count; i++) *codes++ = from[i] >> (part * bits) & mask;
  }
}

// The same, added to codes: so many bits of each byte, from bit `to` of codes on.
void add_parts(std::uint8_t* codes, const std::uint8_t* from, int count, int num_parts, int to) {
  const int bits = 8 / num_parts, mask = (1 << bits) - 1;
  for (int part = 0; part < num_parts; part++) {
    for (int i = 0; i < count; i++) *codes++ |= (from[i] >> (part * bits) & mask) << to;
  }
}

// One bit for each of 32 codes.
void add_bits(std::uint8_t* codes, const std::uint8_t* from) {
  for (int i = 0; i < 32; i++) codes[i] |= (from[i / 8] >> i % 8 & 1) << 4;
}

// Eight scales and eight minima of six bits.
void read_sixes(Block& to, const std::uint8_t* from) {
  for (int i = 0; i < 4; i++) {
    to.scales[i] = from[i] & 63;
    to.minima[i] = from[4 + i] & 63;
    to.scales[4 + i] = (from[8 + i] & 15) | (from[i] >> 2 & 48);
    to.minima[4 + i] = from[8 + i] >> 4 | (from[4 + i] >> 2 & 48);
  }
}

Block read_block(PackedType type, const std::uint8_t* from) {
  Block to;
  switch (type) {
    case PackedType::none:
      break;
    case PackedType::q4_0:
    case PackedType::iq4_nl:
      to.scale = half_at(from);
      read_parts(to.codes, from + 2, 16, 2);
      break;
    case PackedType::q4_1:
      to.scale = half_at(from), to.minimum = half_at(from + 2);
      read_parts(to.codes, from + 4, 16, 2);
      break;
    case PackedType::q5_0:
      to.scale = half_at(from);
      read_parts(to.codes, from + 6, 16, 2);
      add_bits(to.codes, from + 2);
      break;
    case PackedType::q5_1:
      to.scale = half_at(from), to.minimum = half_at(from + 2);
      read_parts(to.codes, from + 8, 16, 2);
      add_bits(to.codes, from + 4);
      break;
    case PackedType::q8_0:
      to.scale = half_at(from);
      for (int i = 0; i < 32; i++) to.codes[i] = from[2 + i] ^ 128;
      break;
    case PackedType::mxfp4:
      to.scales[0] = from[0];
      read_parts(to.codes, from + 1, 16, 2);
      break;
    case PackedType::q2_k:
      to.scale = half_at(from + 80), to.minimum = half_at(from + 82);
      for (int i = 0; i < 16; i++) to.scales[i] = from[i] & 15, to.minima[i] = from[i] >> 4;
      for (int half = 0; half < 2; half++) read_parts(to.codes + half * 128, from + 16 + half * 32, 32, 4);
      break;
    case PackedType::q3_k:
      to.scale = half_at(from + 108);
      read_parts(to.scales, from + 96, 8, 2);
      add_parts(to.scales, from + 104, 4, 4, 4);
      for (std::uint8_t& scale : to.scales) scale -= 32;
      for (int half = 0; half < 2; half++) read_parts(to.codes + half * 128, from + 32 + half * 32, 32, 4);
      add_parts(to.codes, from, 32, 8, 2);
      break;
    case PackedType::q4_k:
      to.scale = half_at(from), to.minimum = half_at(from + 2);
      read_sixes(to, from + 4);
      for (int part = 0; part < 4; part++) read_parts(to.codes + part * 64, from + 16 + part * 32, 32, 2);
      break;
    case PackedType::q5_k:
      to.scale = half_at(from), to.minimum = half_at(from + 2);
      read_sixes(to, from + 4);
      for (int part = 0; part < 4; part++) read_parts(to.codes + part * 64, from + 48 + part * 32, 32, 2);
      add_parts(to.codes, from + 16, 32, 8, 4);
      break;
    case PackedType::q6_k:
      to.scale = half_at(from + 208);
      std::copy_n(from + 192, 16, to.scales);
      for (int half = 0; half < 2; half++) {
        read_parts(to.codes + half * 128, from + half * 64, 64, 2);
        add_parts(to.codes + half * 128, from + 128 + half * 32, 32, 4, 4);
      }
      break;
    case PackedType::iq4_xs: {
      to.scale = half_at(from);
      const int high = half_at(from + 2);
      for (int i = 0; i < 8; i++) {
        to.scales[i] = ((from[4 + i / 2] >> i % 2 * 4 & 15) | (high >> 2 * i & 3) << 4) - 32;
        read_parts(to.codes + i * 32, from + 8 + i * 16, 16, 2);
      }
      break;
    }
    case PackedType::i4_32:
    case PackedType::i4_128:
      to.factor = load<float>(from), to.minimum = half_at(from + 4);
      for (std::size_t i = 0; i < format_of(type).block(); i++) to.codes[i] = from[6 + i / 2] >> i % 2 * 4 & 15;
      break;
    case PackedType::i8_32:
    case PackedType::i8_128:
      to.factor = load<float>(from), to.minimum = half_at(from + 4);
      std::copy_n(from + 6, format_of(type).block(), to.codes);
      break;
    case PackedType::f8_128:
      to.factor = load<float>(from);
      std::copy_n(from + 4, 128, to.codes);
      break;
  }
  return to;
}

std::uint32_t word_at(const std::uint8_t* from) { return load<std::uint32_t>(from); }

// The codes of a group as one column of a panel has them.
void write_codes(const Format& format, const std::uint8_t* codes, std::uint8_t* to) {
  if (format.table == Table::fp8) {
    for (int i = 0; i < format.group; i++) to[i / 2 * (2 * kPanel) + i % 2] = codes[i];
    return;
  }
  if (format.bits == 8) {
    for (int i = 0; i < format.group; i += 4, to += kWordsBytes) store(to, word_at(codes + i));
    return;
  }
  const std::uint32_t nibbles = 0x0f0f0f0f, mask = (0x10101010u << (format.bits - 4)) - 0x10101010u;
  std::uint32_t rest = 0;
  for (int i = 0; i < format.group; i += 8, to += kWordsBytes) {
    const std::uint32_t first = word_at(codes + i), second = word_at(codes + i + 4);
    store(to, (first & nibbles) | (second & nibbles) << 4);
    rest |= (first & mask) >> 4 << i / 4 * (format.bits - 4);
    rest |= (second & mask) >> 4 << (i / 4 + 1) * (format.bits - 4);
  }
  if (format.bits > 4) store(to, rest);
}

void read_codes(const Format& format, const std::uint8_t* from, std::uint8_t* codes) {
  const std::uint8_t* rest = from + format.group / 8 * kWordsBytes;
  for (int i = 0; i < format.group; i++) {
    if (format.table == Table::fp8) {
      codes[i] = from[i / 2 * (2 * kPanel) + i % 2];
    } else if (format.bits == 8) {
      codes[i] = from[i / 4 * kWordsBytes + i % 4];
    } else {
      codes[i] = from[i / 8 * kWordsBytes + i % 4] >> i / 4 % 2 * 4 & 15;
      const int mask = (1 << (format.bits - 4)) - 1;
      if (format.bits > 4) codes[i] |= (rest[i % 4] >> i / 4 * (format.bits - 4) & mask) << 4;
    }
  }
}

constexpr int kGroup = 32;
// Numbers of one row a lane.
using Group = f32xn[kGroup];

EVENTLM_INLINE f32xn codes_of(f32xn x, f32xn steps, f32xn least, float most_code) {
  const f32xn most = f32xn{} + most_code, codes = (x - least) * steps;
  return rounded(codes > 0.0f ? (codes < most ? codes : most) : f32xn{});
}

// A line scale * code + minimum.
struct Fit {
  f32xn scale, minimum;
};

// The one that is nearest to a group, by the sum of squares. Large numbers count more, by their square and that of
// all: divergence of a model's distributions was a sixth less than where all count the same.
//
// Tried are codes that divide the group's range by 13 to 16, where all of them are at least 0 and at most 15, and then
// those that are nearest to the best line.
Fit fit(const Group& x) {
  f32xn least = x[0], most = x[0], mean_square = {}, sum = {}, total = {}, best_gain;
  Group weights;
  for (const f32xn& part : x) {
    least = part < least ? part : least;
    most = part > most ? part : most;
    mean_square += part * part / kGroup;
  }
  for (int i = 0; i < kGroup; i++) {
    weights[i] = x[i] * x[i] + mean_square;
    total += weights[i];
    sum += weights[i] * x[i];
  }
  // Without steps, the mean.
  Fit best = {f32xn{}, total == 0.0f ? f32xn{} : sum / total};
  best_gain = sum * best.minimum;
  const auto attempt = [&](f32xn steps, f32xn from) __attribute__((always_inline)) {
    f32xn codes_sum = {}, squares = {}, products = {};
    for (int i = 0; i < kGroup; i++) {
      const f32xn codes = codes_of(x[i], steps, from, 15), weighted = weights[i] * codes;
      codes_sum += weighted;
      squares += weighted * codes;
      products += weighted * x[i];
    }
    const f32xn spread = total * squares - codes_sum * codes_sum;
    const f32xn scale = (total * products - sum * codes_sum) / spread;
    const f32xn minimum = (squares * sum - codes_sum * products) / spread;
    // What the line takes from the sum of the squares.
    const f32xn gain = scale * products + minimum * sum;
    const auto is_better = (spread > 0.0f) & (gain > best_gain);
    best.scale = is_better ? scale : best.scale;
    best.minimum = is_better ? minimum : best.minimum;
    best_gain = is_better ? gain : best_gain;
  };
  // Of one number, codes stay 0.
  const auto over = [](float steps, f32xn range) { return range > 0.0f ? steps / range : f32xn{}; };
  for (float steps = 13; steps <= 16; steps += 0.25f) attempt(over(steps, most - least), least);
  for (int i = 0; i < 2; i++) attempt(over(1, best.scale), best.minimum);
  return best;
}

// The scale of codes of 8 bits.
f32xn scale_of_bytes(const Group& x) {
  f32xn largest = {}, spoilt = {};
  for (const f32xn& part : x) {
    const f32xn size = part < 0.0f ? -part : part;
    largest = size > largest ? size : largest;
    // What is no number makes the scale none.
    spoilt += part * 0.0f;
  }
  return largest / 127 + spoilt;
}

}  // namespace

void PackedMatrix::pack(const std::uint8_t* row, std::size_t at) {
  const Format format = this->format();
  const std::size_t column = at % kPanel;
  std::uint8_t* panel = panels + at / kPanel * panel_bytes();
  for (std::size_t input = 0; input < num_in; input += format.block(), row += format.block_bytes) {
    const Block block = read_block(type, row);
    std::uint8_t* span = panel + input / format.span() * format.span_bytes();
    if (format.scales == Scales::halves || format.is_nested()) {
      store(span + 2 * column, block.scale);
      if (format.has_minima) store(span + 2 * kPanel + 2 * column, block.minimum);
    }
    for (std::size_t i = 0; i < format.block(); i += format.group) {
      const std::size_t number = (input + i) % format.span() / format.group;
      if (format.scales == Scales::floats) {
        store(span + number * format.scale_bytes() + 4 * column, block.factor);
        if (format.has_minima)
          store(span + format.first_minimum() + number * format.minimum_bytes() + 2 * column, block.minimum);
      } else if (format.scales != Scales::halves) {
        span[format.first_scale() + number * kPanel + column] = block.scales[i / format.group];
        if (format.has_minima) span[format.first_minimum() + number * kPanel + column] = block.minima[i / format.group];
      }
      write_codes(format, block.codes + i,
                  span + format.first_code() + number * format.code_bytes() + format.code_step() * column);
    }
  }
}

void PackedMatrix::round(const bf16* rows, std::size_t num_rows, std::size_t at) {
  const Format format = this->format();
  const bool is_bytes = format.bits == 8;
  for (std::size_t row = 0; row < num_rows; row += kNative) {
    const std::size_t column = (at + row) % kPanel, num_lanes = std::min<std::size_t>(kNative, num_rows - row);
    std::uint8_t* span = panels + (at + row) / kPanel * panel_bytes();
    for (std::size_t input = 0; input < num_in; input += kGroup, span += format.span_bytes()) {
      Group x = {};
      for (std::size_t lane = 0; lane < num_lanes; lane++) {
        for (int i = 0; i < kGroup; i++) x[i][lane] = to_float(rows[(row + lane) * num_in + input + i]);
      }
      const Fit best = is_bytes ? Fit{scale_of_bytes(x), {}} : fit(x);
      f32xn scale = {}, minimum = {};
      for (std::size_t lane = 0; lane < num_lanes; lane++) {
        const std::uint16_t halves[] = {to_half(best.scale[lane]), to_half(best.minimum[lane])};
        store(span + 2 * (column + lane), halves[0]);
        if (!is_bytes) store(span + 2 * (kPanel + column + lane), halves[1]);
        scale[lane] = half_to_float(halves[0]);
        minimum[lane] = is_bytes ? -128 * scale[lane] : half_to_float(halves[1]);
      }
      std::uint8_t* to = span + format.first_code() + 4 * column;
      const int at_once = is_bytes ? 4 : 8;
      for (int i = 0; i < kGroup; i += at_once, to += kWordsBytes) {
        u32xn words = {};
        for (int j = 0; j < at_once; j++) {
          const f32xn codes = codes_of(x[i + j], 1.0f / scale, minimum, is_bytes ? 255 : 15);
          words |= (u32xn) __builtin_convertvector(codes, i32xn) << (j % 4 * 8 + j / 4 * 4);
        }
        store(to, words);
      }
    }
  }
}

void PackedMatrix::unpack(std::size_t at, float* to) const {
  const Format format = this->format();
  const std::size_t column = at % kPanel;
  const std::uint8_t* table = kTables[static_cast<int>(format.table)];
  for (std::size_t input = 0; input < num_in; input += format.group) {
    const std::uint8_t* span = panel(at / kPanel) + input / format.span() * format.span_bytes();
    const std::size_t number = input % format.span() / format.group;
    const std::uint8_t scale_byte = span[format.first_scale() + number * kPanel + column];
    float scale = 1, minimum = 0, zero = static_cast<float>(format.offset);
    if (format.scales == Scales::floats) {
      scale = load<float>(span + number * format.scale_bytes() + 4 * column);
      if (format.has_minima)
        zero = half_to_float(half_at(span + format.first_minimum() + number * format.minimum_bytes() + 2 * column));
    } else if (format.scales == Scales::powers) {
      scale = float_of_bits(scale_byte < 2 ? 0x200000u << scale_byte : (scale_byte - 1u) << 23);
    } else {
      scale = half_to_float(half_at(span + 2 * column));
      if (format.has_minima) minimum = half_to_float(half_at(span + 2 * kPanel + 2 * column));
    }
    if (format.scales == Scales::bytes) {
      scale *= scale_byte;
      minimum *= -static_cast<float>(span[format.first_minimum() + number * kPanel + column]);
    }
    if (format.scales == Scales::integers) scale *= static_cast<std::int8_t>(scale_byte);
    std::uint8_t codes[128];
    read_codes(format, span + format.first_code() + number * format.code_bytes() + format.code_step() * column, codes);
    for (std::size_t i = 0; i < std::min<std::size_t>(format.group, num_in - input); i++) {
      if (format.table == Table::fp8) {
        *to++ = scale * half_to_float(static_cast<std::uint16_t>((codes[i] & 128) << 8 | (codes[i] & 127) << 7));
        continue;
      }
      const int code = format.table == Table::none ? codes[i] : table[codes[i]];
      const float value = scale * (static_cast<float>(code) - zero);
      *to++ = format.has_minima && format.scales != Scales::floats ? value + minimum : value;
    }
  }
}

}  // namespace eventlm
