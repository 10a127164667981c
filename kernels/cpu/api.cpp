// What Python calls, by ctypes. Nothing here raises: what can fail returns null.
#include <exception>

#include "decoder.h"

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

using eventlm::Decoder;

#define EVENTLM_EXPORT __attribute__((visibility("default")))

extern "C" {

// 0 if this machine can run what was compiled for it; AMX must be asked for.
EVENTLM_EXPORT int eventlm_prepare() {
#if defined(__AMX_BF16__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? 0 : 1;
#else
  return 0;
#endif
}

// Returns null if there is no memory, or the system does not give as many threads.
EVENTLM_EXPORT Decoder* eventlm_decoder(const eventlm::Shape* shape, const float* cosines, const float* sines,
                                        std::int32_t num_threads) {
  try {
    return new Decoder(*shape, cosines, sines, num_threads);
  } catch (const std::exception&) {
    return nullptr;
  }
}

EVENTLM_EXPORT void eventlm_free(Decoder* decoder) { delete decoder; }

EVENTLM_EXPORT void eventlm_load_matrix(Decoder* decoder, std::int32_t weight, std::int32_t layer,
                                        const std::uint16_t* source) {
  decoder->load_matrix(static_cast<eventlm::Weight>(weight), layer, source);
}

EVENTLM_EXPORT void eventlm_load_vector(Decoder* decoder, std::int32_t weight, std::int32_t layer,
                                        const float* source) {
  decoder->load_vector(static_cast<eventlm::Weight>(weight), layer, source);
}

// starts, counts, tables: of each row; a table is where its block numbers begin in `blocks`.
EVENTLM_EXPORT void eventlm_forward(Decoder* decoder, const std::int32_t* token_ids, std::int32_t num_rows,
                                    const std::int32_t* starts, const std::int32_t* counts, const std::int32_t* tables,
                                    const std::int32_t* blocks, std::uint32_t* kv, std::int32_t num_blocks,
                                    std::int32_t block_size, float* hidden) {
  std::vector<eventlm::StepRow> rows;
  for (int row = 0; row < num_rows; row++) rows.push_back({starts[row], counts[row], blocks + tables[row]});
  decoder->forward(token_ids, rows, kv, num_blocks, block_size, hidden);
}

EVENTLM_EXPORT void eventlm_norm(const Decoder* decoder, const float* hidden, std::int32_t num_rows, float* out) {
  decoder->norm(hidden, num_rows, out);
}

EVENTLM_EXPORT void eventlm_logits(Decoder* decoder, const float* hidden, std::int32_t num_rows, float* out) {
  decoder->logits(hidden, num_rows, out);
}

EVENTLM_EXPORT void eventlm_draw(Decoder* decoder, const float* logits, std::int32_t num_rows,
                                 const float* temperatures, const std::uint32_t* keys, std::int32_t* ids) {
  decoder->draw(logits, num_rows, temperatures, keys, ids);
}

EVENTLM_EXPORT const std::int64_t* eventlm_times(const Decoder* decoder) { return decoder->times(); }
}
