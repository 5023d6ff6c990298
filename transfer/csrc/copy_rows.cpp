// Copies rows between pools of pages, or between a pool and staging memory: gather, scatter and pull are one loop.
//
// Large copies bypass the caches on the way out (non-temporal stores): a plain copy first reads the lines that it is
// about to overwrite, a third of all traffic. Small ones do not: whoever asked is about to read them.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__AVX512F__) || defined(__AVX__)
#include <immintrin.h>
#endif

namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kStreamFrom = 256u << 10;  // bytes of one call, from which on the caches are bypassed
constexpr std::size_t kThreadBytes = 1u << 20;   // least that is worth a thread of its own

struct Side {
  std::uint8_t* base;
  const std::int32_t* ids;  // null: rows 0, 1, 2, ...
  std::size_t stride;

  std::uint8_t* row(std::size_t i) const { return base + (ids ? static_cast<std::size_t>(ids[i]) : i) * stride; }
};

#if defined(__AVX512F__) || defined(__AVX__)
constexpr bool kStreams = true;

inline void stream_line(std::uint8_t* to, const std::uint8_t* from) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#else
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32));
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), low);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), high);
#endif
}

inline void fence() { _mm_sfence(); }
#else
constexpr bool kStreams = false;
inline void stream_line(std::uint8_t* to, const std::uint8_t* from) { std::memcpy(to, from, kLine); }
inline void fence() {}
#endif

// Whole lines to a line boundary.
void stream(std::uint8_t* to, const std::uint8_t* from, std::size_t bytes) {
  std::size_t at = 0;
  for (; at + 4 * kLine <= bytes; at += 4 * kLine)
    for (std::size_t line = 0; line < 4; ++line) stream_line(to + at + line * kLine, from + at + line * kLine);
  for (; at < bytes; at += kLine) stream_line(to + at, from + at);
}

void copy_some(const Side& to, const Side& from, std::size_t first, std::size_t end, std::size_t row_bytes,
               bool streaming) {
  for (std::size_t i = first; i < end; ++i) {
    std::uint8_t* const target = to.row(i);
    if (streaming && reinterpret_cast<std::uintptr_t>(target) % kLine == 0)
      stream(target, from.row(i), row_bytes);
    else
      std::memcpy(target, from.row(i), row_bytes);
  }
  if (streaming) fence();
}

}  // namespace

// Row to_ids[i] of `to` becomes row from_ids[i] of `from`, for `rows` rows of `row_bytes` bytes that lie `stride` apart.
// The caller vouches for the ids. At most `threads` threads, this one included.
extern "C" void baton_copy_rows(std::uint8_t* to, const std::int32_t* to_ids, std::int64_t to_stride, std::uint8_t* from,
                                const std::int32_t* from_ids, std::int64_t from_stride, std::int64_t rows,
                                std::int64_t row_bytes, std::int32_t threads) {
  const Side target{to, to_ids, static_cast<std::size_t>(to_stride)};
  const Side source{from, from_ids, static_cast<std::size_t>(from_stride)};
  const auto count = static_cast<std::size_t>(rows), bytes = static_cast<std::size_t>(row_bytes);
  const std::size_t total = count * bytes;
  const bool streaming = kStreams && total >= kStreamFrom && bytes % kLine == 0;
  std::size_t teams = total / kThreadBytes;
  if (teams > static_cast<std::size_t>(threads)) teams = static_cast<std::size_t>(threads);
  if (teams > count) teams = count;
  if (teams < 1) teams = 1;
  const auto part = [&](std::size_t team) {
    copy_some(target, source, count * team / teams, count * (team + 1) / teams, bytes, streaming);
  };
  std::vector<std::thread> helpers;
  for (std::size_t team = 1; team < teams; ++team) helpers.emplace_back(part, team);
  part(0);
  for (std::thread& helper : helpers) helper.join();
}
