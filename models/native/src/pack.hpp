// Weights from floats to the layouts of gemm.hpp.  Rows are outputs, as checkpoints have them.
//
// The one idea: int8 has one scale an output, its largest magnitude being 127, so that a product is exact integers times
// one number.  What is padded weighs nothing.
#pragma once

#include "gemm.hpp"

// Row `n` of [N, K] floats, its padding zeros: whoever packs says where an output's weights come from.
using Source = const float* const*;  // [N rounded up], null where there is none

inline void pack_float32(Source rows, int outputs, int inputs, int k, float* out) {
    for (int b = 0; b < outputs / COLUMNS; ++b, out += size_t(k) * COLUMNS)
        for (int c = 0; c < COLUMNS; ++c) {
            const float* row = rows[b * COLUMNS + c];
            for (int i = 0; i < k; ++i) out[size_t(i) * COLUMNS + c] = row && i < inputs ? row[i] : 0.f;
        }
}

inline void pack_int8(Source rows, int outputs, int inputs, int k, uint8_t* out, float* scales) {
    for (int b = 0; b < outputs / COLUMNS; ++b, out += size_t(k) * COLUMNS) {
        float inverse[COLUMNS];
        for (int c = 0; c < COLUMNS; ++c) {
            const float* row = rows[b * COLUMNS + c];
            float most = 0.f;
            if (row) for (int i = 0; i < inputs; ++i) most = std::fmax(most, std::fabs(row[i]));
            scales[b * COLUMNS + c] = most / 127.f;
            inverse[c] = most > 0.f ? 127.f / most : 0.f;
        }
        for (int i = 0; i < k; i += 4)
            for (int c = 0; c < COLUMNS; ++c) {
                const float* row = rows[b * COLUMNS + c];
                for (int j = 0; j < 4; ++j) {
                    const float v = row && i + j < inputs ? row[i + j] * inverse[c] : 0.f;
                    out[(size_t(i / 4) * COLUMNS + c) * 4 + j] = uint8_t(int(std::nearbyintf(v)) + 128);
                }
            }
    }
}
