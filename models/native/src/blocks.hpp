// Blocks of numbers as GGUF files store them: their codes, scales and numbers.
//
// Formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.  Every number is a code times a scale, some plus
// a least number.  A code times a scale is exact in float32, so every decoder gives the same floats.
#pragma once

#include <algorithm>
#include <cmath>

#include "gemm.hpp"

// FLOATS: plain float32.  Blocks of the K formats have 256 numbers, the others GROUP.  As BLOCK_KINDS in library.py.
enum Kind : uint8_t { FLOATS = 0, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, KINDS_OF_BLOCKS };

constexpr int STORED_BYTES[KINDS_OF_BLOCKS] = {4 * GROUP, 18, 20, 22, 24, 34, 144, 176, 210};  // of a block
constexpr bool is_k_format(int kind) { return kind >= Q4_K; }
constexpr int groups_of(int kind) { return is_k_format(kind) ? 8 : 1; }  // of a block
// Whether numbers are a code from 0 on times a scale, plus a least number.
constexpr bool has_least(int kind) { return kind == Q4_1 || kind == Q5_1 || kind == Q4_K || kind == Q5_K; }

// GROUP neighbouring numbers: number i is codes[i] * scales[i / 16], plus `least` in formats with one.
struct StoredGroup {
    int8_t codes[GROUP];
    float scales[2], least;
};

INLINE float half_at(const uint8_t* p) {
    fp16 bits; memcpy(&bits, p, 2);
    return widen_half(bits);
}

// Codes from low bits, two in a byte, with further high bits and a number that is subtracted.
INLINE void read_codes(const uint8_t* pairs, uint32_t high, int less, int8_t* codes) {
    for (int i = 0; i < 16; ++i) {
        codes[i] = int8_t((pairs[i] & 15 | (high >> i & 1) << 4) - less);
        codes[16 + i] = int8_t((pairs[i] >> 4 | (high >> (16 + i) & 1) << 4) - less);
    }
}

INLINE void read_codes(const uint8_t* pairs, int less, int8_t* codes) {
    for (int i = 0; i < 16; ++i) {
        codes[i] = int8_t((pairs[i] & 15) - less);
        codes[16 + i] = int8_t((pairs[i] >> 4) - less);
    }
}

// Scale and least number of group `g` of a block of Q4_K or Q5_K: 6 bits each, times the block's two halves.
INLINE void read_k_scales(const uint8_t* block, int g, StoredGroup& out) {
    const uint8_t* s = block + 4;
    const int scale = g < 4 ? s[g] & 63 : s[g + 4] & 15 | s[g - 4] >> 6 << 4;
    const int least = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | s[g] >> 6 << 4;
    out.scales[0] = out.scales[1] = half_at(block) * float(scale);
    out.least = -(half_at(block + 2) * float(least));
}

// Group `g`, counted from 0, of a row of blocks; not of FLOATS.
INLINE void read_group(int kind, const uint8_t* row, int g, StoredGroup& out) {
    const uint8_t* block = row + size_t(g / groups_of(kind)) * STORED_BYTES[kind];
    out.least = 0.f;
    if (!is_k_format(kind)) out.scales[0] = out.scales[1] = half_at(block);
    else g %= 8;
    uint32_t high = 0;
    switch (kind) {
        case Q4_0: return read_codes(block + 2, 8, out.codes);
        case Q4_1: out.least = half_at(block + 2); return read_codes(block + 4, 0, out.codes);
        case Q5_0: memcpy(&high, block + 2, 4); return read_codes(block + 6, high, 16, out.codes);
        case Q5_1: out.least = half_at(block + 2); memcpy(&high, block + 4, 4); return read_codes(block + 8, high, 0, out.codes);
        case Q8_0: memcpy(out.codes, block + 2, GROUP); return;
        case Q4_K: case Q5_K: {
            read_k_scales(block, g, out);
            const uint8_t* low = block + (kind == Q4_K ? 16 : 48) + g / 2 * 32;
            for (int i = 0; i < GROUP; ++i) out.codes[i] = int8_t(g % 2 ? low[i] >> 4 : low[i] & 15);
            if (kind == Q5_K) for (int i = 0; i < GROUP; ++i) out.codes[i] |= int8_t((block[16 + i] >> g & 1) << 4);
            return;
        }
        default: {  // Q6_K: 4 low bits of 256 numbers, 2 high bits, then the scales of 16 groups of 16
            const uint8_t* low = block + g / 4 * 64 + g % 2 * 32;
            const uint8_t* top = block + 128 + g / 4 * 32;
            const float scale = half_at(block + 208);
            for (int i = 0; i < 2; ++i) out.scales[i] = scale * float(int8_t(block[192 + 2 * g + i]));
            for (int i = 0; i < GROUP; ++i) {
                const int bits = g % 4 < 2 ? low[i] & 15 : low[i] >> 4;
                out.codes[i] = int8_t((bits | (top[i] >> 2 * (g % 4) & 3) << 4) - 32);
            }
        }
    }
}

// The numbers [GROUP] of a group.
INLINE void widen_group(int kind, const StoredGroup& group, float* out) {
    for (int i = 0; i < GROUP; ++i) {
        out[i] = float(group.codes[i]) * group.scales[i / 16];
        if (has_least(kind)) out[i] += group.least;
    }
}

// `count` blocks to floats.
inline void decode(int kind, const uint8_t* blocks, int64_t count, float* out) {
    StoredGroup group;
    for (int64_t b = 0; b < count; ++b, blocks += STORED_BYTES[kind])
        for (int g = 0; g < groups_of(kind); ++g, out += GROUP) {
            read_group(kind, blocks, g, group);
            widen_group(kind, group, out);
        }
}

// Whether no scale of `count` blocks is infinite or NaN, and so none of their numbers.
inline bool are_finite(int kind, const uint8_t* blocks, int64_t count) {
    const int first = kind == Q6_K ? 208 : 0, second = has_least(kind) ? 2 : first;
    bool finite = true;
    for (int64_t b = 0; b < count; ++b, blocks += STORED_BYTES[kind]) {
        fp16 one, other; memcpy(&one, blocks + first, 2); memcpy(&other, blocks + second, 2);
        finite &= (one & 0x7c00) != 0x7c00 && (other & 0x7c00) != 0x7c00;
    }
    return finite;
}

// The largest magnitude of `count` blocks.
inline float largest_stored(int kind, const uint8_t* blocks, int64_t count) {
    StoredGroup group;
    float most = 0.f, numbers[GROUP];
    for (int64_t b = 0; b < count; ++b, blocks += STORED_BYTES[kind])
        for (int g = 0; g < groups_of(kind); ++g) {
            read_group(kind, blocks, g, group);
            widen_group(kind, group, numbers);
            for (int i = 0; i < GROUP; ++i) most = std::max(most, std::fabs(numbers[i]));
        }
    return most;
}
