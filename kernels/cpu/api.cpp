// What Python calls, by ctypes. No exception leaves this: what makes an object returns null, all else 1 if there is no
// memory, what Met has if a group does not meet any more, and 0.
#include <exception>
#include <new>
#include <utility>

#include "decoder.h"
#include "meeting.h"
#include "paged_attention.h"
#include "products.h"

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

using eventlm::Decoder;
using eventlm::Meeting;
using eventlm::PagedAttention;
using eventlm::Products;
using eventlm::SharedMeeting;

#define EVENTLM_EXPORT __attribute__((visibility("default")))

namespace {

// Raise it, here and in native.py, with every change to what a function below takes or gives: its arguments and their
// meaning, what program.h has, the order of Part or KVFormat, the numbers of PackedType. native.py takes a library with
// another for none.
constexpr int kInterface = 15;

template <class Work>
std::int32_t run(Work&& work) {
  try {
    work();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  } catch (const eventlm::MeetingEnded& ended) {
    return static_cast<std::int32_t>(ended.how);
  }
}

std::vector<eventlm::Draw> draws_of(std::int32_t num_rows, const float* temperatures, const std::uint64_t* keys,
                                    const std::int64_t* positions) {
  std::vector<eventlm::Draw> draws;
  for (int row = 0; row < num_rows; row++) draws.emplace_back(temperatures[row], keys[row], positions[row]);
  return draws;
}

eventlm::Matrix matrix_at(char* memory, std::int64_t num_out, std::int64_t num_in) {
  eventlm::Matrix matrix;
  matrix.num_out = num_out, matrix.num_in = num_in;
  matrix.set_memory(memory);
  return matrix;
}

}  // namespace

extern "C" {

EVENTLM_EXPORT int eventlm_interface() { return kInterface; }

// 0 if this machine can run what was compiled for it; AMX must be asked for.
EVENTLM_EXPORT int eventlm_prepare() {
#if defined(__AMX_BF16__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? 0 : 1;
#else
  return 0;
#endif
}

// Of the memory where members meet.
EVENTLM_EXPORT std::int64_t eventlm_segment_bytes(std::int32_t size, std::int64_t slot_bytes) {
  return SharedMeeting::segment_bytes(size, slot_bytes);
}

// Returns null as eventlm_decoder does, or if another has this number.
EVENTLM_EXPORT Meeting* eventlm_meeting(char* memory, std::int32_t size, std::int32_t number, std::int64_t slot_bytes,
                                        std::int64_t spin_ns) {
  auto meeting = new (std::nothrow) SharedMeeting(memory, size, number, slot_bytes, spin_ns);
  if (meeting != nullptr && !meeting->is_first()) {
    delete meeting;
    meeting = nullptr;
  }
  return meeting;
}

// mine, all: see CarriedMeeting.
EVENTLM_EXPORT Meeting* eventlm_carried_meeting(char* mine, char* all, eventlm::Carry carry, void* context,
                                                std::int32_t size, std::int32_t number, std::int64_t slot_bytes) {
  return new (std::nothrow) eventlm::CarriedMeeting(mine, all, carry, context, size, number, slot_bytes);
}

EVENTLM_EXPORT void eventlm_free_meeting(Meeting* meeting) { delete meeting; }

// The member's slot of the meeting to come.
EVENTLM_EXPORT char* eventlm_slot(Meeting* meeting) { return meeting->mine(); }

// A member's slot of the last meeting.
EVENTLM_EXPORT const char* eventlm_part(const Meeting* meeting, std::int32_t member) { return meeting->part(member); }

EVENTLM_EXPORT std::int32_t eventlm_meet(Meeting* meeting, std::int64_t num_bytes) {
  return static_cast<std::int32_t>(meeting->meet(num_bytes));
}

// out: [size, num_bytes].
EVENTLM_EXPORT std::int32_t eventlm_gather(Meeting* meeting, const char* bytes, std::int64_t num_bytes, char* out) {
  return static_cast<std::int32_t>(meeting->gather(bytes, num_bytes, out));
}

EVENTLM_EXPORT std::int64_t eventlm_num_meetings(const Meeting* meeting) { return meeting->num_meetings(); }

EVENTLM_EXPORT void eventlm_leave(Meeting* meeting) { meeting->leave(); }

// meeting: null for a decoder without peers; vocab_starts: null if each has the whole vocabulary, else see Peers.
// sharing: null for a decoder without sharers, else see Sharers.
// Returns null if there is no memory, or the system does not give as many threads.
EVENTLM_EXPORT Decoder* eventlm_decoder(const eventlm::Shape* shape, const eventlm::Instruction* program,
                                        std::int32_t num_instructions, const float* const* cosines,
                                        const float* const* sines, std::int32_t is_int8,
                                        const eventlm::TypedWeight* types, std::int32_t num_types, Meeting* meeting,
                                        const std::int32_t* vocab_starts, Meeting* sharing, std::int32_t shard_tokens,
                                        std::int32_t num_threads) {
  try {
    eventlm::Peers peers{meeting, {}};
    if (vocab_starts != nullptr) peers.vocab_starts.assign(vocab_starts, vocab_starts + meeting->size() + 1);
    return new Decoder(*shape, {program, program + num_instructions}, cosines, sines, is_int8 != 0,
                       {types, types + num_types}, peers, {sharing, shard_tokens}, num_threads);
  } catch (const std::exception&) {
    return nullptr;
  }
}

// Bytes that a matrix of codes takes.
EVENTLM_EXPORT std::int64_t eventlm_packed_bytes(eventlm::PackedType type, std::int64_t num_out, std::int64_t num_in) {
  const eventlm::PackedMatrix matrix = {nullptr, static_cast<std::size_t>(num_out), static_cast<std::size_t>(num_in),
                                        type};
  return static_cast<std::int64_t>(matrix.num_bytes());
}

EVENTLM_EXPORT void eventlm_free(Decoder* decoder) { delete decoder; }

// weight: embedding or inputs_embedding.
EVENTLM_EXPORT void eventlm_set_embedding(Decoder* decoder, std::int32_t weight, const std::uint16_t* embedding) {
  decoder->set_embedding(static_cast<eventlm::Weight>(weight), embedding);
}

// processors: as many as there are threads.
EVENTLM_EXPORT void eventlm_pin(Decoder* decoder, const std::int32_t* processors) { decoder->pin(processors); }

// expert: -1 for what is of none, here and below.
EVENTLM_EXPORT std::int32_t eventlm_load_matrix(Decoder* decoder, std::int32_t weight, std::int32_t layer,
                                                std::int32_t expert, const std::uint16_t* rows, std::int64_t first_row,
                                                std::int64_t num_rows) {
  return run(
      [&] { decoder->load_matrix(static_cast<eventlm::Weight>(weight), layer, expert, rows, first_row, num_rows); });
}

EVENTLM_EXPORT std::int32_t eventlm_load_packed(Decoder* decoder, std::int32_t weight, std::int32_t layer,
                                                std::int32_t expert, const std::uint8_t* rows, std::int64_t first_row,
                                                std::int64_t num_rows) {
  return run(
      [&] { decoder->load_packed(static_cast<eventlm::Weight>(weight), layer, expert, rows, first_row, num_rows); });
}

EVENTLM_EXPORT std::int32_t eventlm_load_vector(Decoder* decoder, std::int32_t weight, std::int32_t is_bias,
                                                std::int32_t layer, std::int32_t expert, const float* source) {
  return run([&] { decoder->load_vector(static_cast<eventlm::Weight>(weight), is_bias != 0, layer, expert, source); });
}

EVENTLM_EXPORT void eventlm_load_exact(Decoder* decoder, std::int32_t weight, std::int32_t layer, const float* rows,
                                       std::int64_t first_row, std::int64_t num_rows) {
  decoder->load_exact(static_cast<eventlm::Weight>(weight), layer, rows, first_row, num_rows);
}

// starts, counts, tables: of each row; a table has its block numbers. kv: of each layer, null if it has none. states:
// of layers that have one, [slots, state_size], else null; then there are of each row its slot, the source, and the
// number of its copies, which are StateCopy one after the other. given: null if the program embeds the tokens. shards,
// shared: of each row with sharers, see StepRow; else null.
EVENTLM_EXPORT std::int32_t eventlm_forward(Decoder* decoder, const std::int32_t* token_ids, std::int32_t num_rows,
                                            const std::int32_t* starts, const std::int32_t* counts,
                                            const std::int32_t* const* tables, const std::int32_t* shards,
                                            const std::int32_t* shared, std::int32_t num_shared,
                                            std::uint8_t* const* kv, std::int32_t format, std::int32_t num_blocks,
                                            std::int32_t block_size, float* states, std::int64_t state_size,
                                            const std::int32_t* slots, const std::int32_t* sources,
                                            const std::int32_t* num_copies, const eventlm::StateCopy* copies,
                                            const float* given, float* hidden) {
  return run([&] {
    std::vector<eventlm::StepRow> rows;
    for (int row = 0; row < num_rows; row++) {
      rows.push_back({starts[row], counts[row], tables[row]});
      if (shards != nullptr) rows.back().first_shard = shards[row], rows.back().first_shared = shared[row];
    }
    eventlm::States kept{states, static_cast<std::size_t>(state_size), {}};
    for (int row = 0; states != nullptr && row < num_rows; row++) {
      kept.rows.push_back({slots[row], sources[row], num_copies[row], copies});
      copies += num_copies[row];
    }
    decoder->forward(token_ids, rows, num_shared, {kv, static_cast<eventlm::KVFormat>(format), num_blocks, block_size},
                     kept, given, hidden);
  });
}

EVENTLM_EXPORT void eventlm_norm(const Decoder* decoder, const float* hidden, std::int32_t num_rows, float* out) {
  decoder->norm(hidden, num_rows, out);
}

EVENTLM_EXPORT std::int32_t eventlm_logits(Decoder* decoder, const float* hidden, std::int32_t num_rows, float* out) {
  return run([&] { decoder->logits(hidden, num_rows, out); });
}

// temperatures, keys, positions: of each row, see Draw.
EVENTLM_EXPORT std::int32_t eventlm_draw(Decoder* decoder, const float* logits, std::int32_t num_rows,
                                         const float* temperatures, const std::uint64_t* keys,
                                         const std::int64_t* positions, std::int32_t* ids) {
  return run([&] { decoder->draw(logits, draws_of(num_rows, temperatures, keys, positions), ids); });
}

EVENTLM_EXPORT std::int32_t eventlm_draw_next(Decoder* decoder, const float* hidden, std::int32_t num_rows,
                                              const float* temperatures, const std::uint64_t* keys,
                                              const std::int64_t* positions, std::int32_t* ids) {
  return run([&] { decoder->draw_next(hidden, draws_of(num_rows, temperatures, keys, positions), ids); });
}

EVENTLM_EXPORT const std::int64_t* eventlm_times(const Decoder* decoder) { return decoder->times(); }

// Returns null as eventlm_decoder does.
EVENTLM_EXPORT Products* eventlm_products(std::int64_t most_inputs, std::int32_t num_threads) {
  try {
    return new Products(most_inputs, num_threads);
  } catch (const std::exception&) {
    return nullptr;
  }
}

EVENTLM_EXPORT void eventlm_free_products(Products* products) { delete products; }

EVENTLM_EXPORT void eventlm_pin_products(Products* products, const std::int32_t* processors) {
  products->pin(processors);
}

// Of memory for a packed matrix.
EVENTLM_EXPORT std::int64_t eventlm_matrix_bytes(std::int64_t num_out, std::int64_t num_in) {
  return matrix_at(nullptr, num_out, num_in).num_bytes();
}

// memory: zeros, from a cache line on.
EVENTLM_EXPORT std::int32_t eventlm_pack(Products* products, char* memory, std::int64_t num_out, std::int64_t num_in,
                                         const std::uint16_t* rows, std::int64_t first_row, std::int64_t num_rows) {
  return run([&] { products->pack(matrix_at(memory, num_out, num_in), rows, first_row, num_rows); });
}

// The same inputs times `num_products` matrices.
EVENTLM_EXPORT std::int32_t eventlm_multiply(Products* products, const eventlm::Product* of, std::int32_t num_products,
                                             std::int64_t num_in, const std::uint16_t* inputs, std::int32_t num_rows) {
  return run([&] { products->multiply({of, of + num_products}, num_in, inputs, num_rows); });
}

EVENTLM_EXPORT void eventlm_norm_rows(Products* products, const std::uint16_t* x, std::int64_t num_rows,
                                      std::int64_t size, const float* weight, float eps, std::uint16_t* out) {
  products->norm(x, num_rows, size, weight, eps, out);
}

// Strides of x: between heads and between tokens.
EVENTLM_EXPORT void eventlm_rotate(Products* products, const std::uint16_t* x, std::int64_t head_stride,
                                   std::int64_t token_stride, std::int64_t num_tokens, std::int32_t num_heads,
                                   std::int32_t head_dim, const std::uint16_t* cosines, const std::uint16_t* sines,
                                   std::uint16_t* out) {
  products->rotate({x, head_stride, token_stride}, num_tokens, num_heads, head_dim, cosines, sines, out);
}

// Works by the threads of `products`, which must be freed later. Returns null if there is no memory.
EVENTLM_EXPORT PagedAttention* eventlm_attention(Products* products) {
  return new (std::nothrow) PagedAttention(products->team());
}

EVENTLM_EXPORT void eventlm_free_attention(PagedAttention* attention) { delete attention; }

// starts, counts, tables: as eventlm_forward has them.
EVENTLM_EXPORT std::int32_t eventlm_begin_attention(PagedAttention* attention, std::int32_t num_rows,
                                                    const std::int32_t* starts, const std::int32_t* counts,
                                                    const std::int32_t* const* tables) {
  return run([&] {
    std::vector<eventlm::StepRow> rows;
    for (int row = 0; row < num_rows; row++) rows.push_back({starts[row], counts[row], tables[row]});
    attention->begin(std::move(rows));
  });
}

// kv: of the layer. strides: of queries, keys and values, between heads and between tokens.
EVENTLM_EXPORT std::int32_t eventlm_attend(PagedAttention* attention, const eventlm::LayerAttention* layer,
                                           std::uint8_t* kv, std::int32_t format, std::int32_t num_blocks,
                                           std::int32_t block_size, const std::uint16_t* queries,
                                           const std::uint16_t* keys, const std::uint16_t* values,
                                           const std::int64_t* strides, float scale, float soft_cap, const float* sinks,
                                           std::uint16_t* out) {
  return run([&] {
    const eventlm::KVStorage storage{&kv, static_cast<eventlm::KVFormat>(format), num_blocks, block_size};
    attention->attend(*layer, storage.layer(0, layer->num_kv_heads, layer->head_dim), {queries, strides[0], strides[1]},
                      {keys, strides[2], strides[3]}, {values, strides[4], strides[5]}, scale, soft_cap, sinks, out);
  });
}
}
