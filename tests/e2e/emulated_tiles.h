// The matrix units that csrc/matrix_tiles.h and csrc/attention_tiles.h use, in plain C++, for processors without them. To be
// included before all else, with __AMX_BF16__ defined. Tiles are 16 rows of 64 bytes, as `Tiles` configures them.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

struct EmulatedTile {
    uint32_t words[16][16];
};

inline EmulatedTile* emulated_tiles() {
    static thread_local EmulatedTile tiles[8];
    return tiles;
}

inline void emulated_load(int tile, const void* from, long stride) {
    for (int row = 0; row < 16; ++row)
        memcpy(emulated_tiles()[tile].words[row], static_cast<const char*>(from) + row * stride, 64);
}

inline void emulated_store(int tile, void* to, long stride) {
    for (int row = 0; row < 16; ++row)
        memcpy(static_cast<char*>(to) + row * stride, emulated_tiles()[tile].words[row], 64);
}

inline float emulated_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline void emulated_dot(int to, int left, int right) {
    EmulatedTile* tiles = emulated_tiles();
    float sums[16][16];
    memcpy(sums, &tiles[to], sizeof sums);
    for (int row = 0; row < 16; ++row)
        for (int pair = 0; pair < 16; ++pair)
            for (int column = 0; column < 16; ++column) {
                const uint32_t a = tiles[left].words[row][pair], b = tiles[right].words[pair][column];
                sums[row][column] += emulated_float(a << 16) * emulated_float(b << 16);
                sums[row][column] += emulated_float(a & 0xffff0000u) * emulated_float(b & 0xffff0000u);
            }
    memcpy(&tiles[to], sums, sizeof sums);
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_zero
#define _tile_loadd(tile, from, stride) emulated_load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated_store(tile, to, stride)
#define _tile_dpbf16ps(to, left, right) emulated_dot(to, left, right)
#define _tile_zero(tile) memset(&emulated_tiles()[tile], 0, sizeof(EmulatedTile))
#define _tile_loadconfig(shape) (void)(shape)
#define _tile_release() (void)0
#define syscall(...) 0  // the system grants them
