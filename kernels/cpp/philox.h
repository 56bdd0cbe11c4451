// Philox 4×32-10: `ops/philox`.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

constexpr int CHUNK = 64;  // counters that are drawn at a time

// `philox.philox4x32` of counters first, first + by, … W is uint32_t where seed, step and site fit, else uint64_t, whose
// upper bits take part.
template <class W>
void philox(int64_t first, int64_t by, W step, W site, W seed, W stream, uint32_t (&out)[4][CHUNK]) {
    for (int n = 0; n < CHUNK; n++) {
        W c0 = (W)(first + n * by), c1 = step, c2 = site, c3 = 0, k0 = seed, k1 = stream;
        for (int round = 0; round < 10; round++) {
            const uint64_t p0 = (uint64_t)c0 * 0xD2511F53u, p1 = (uint64_t)c2 * 0xCD9E8D57u;
            c0 = (W)(p1 >> 32 & 0xffffffffu) ^ c1 ^ k0, c2 = (W)(p0 >> 32 & 0xffffffffu) ^ c3 ^ k1;
            c1 = (W)(p1 & 0xffffffffu), c3 = (W)(p0 & 0xffffffffu);
            k0 = (W)(uint32_t)(k0 + 0x9E3779B9u), k1 = (W)(uint32_t)(k1 + 0xBB67AE85u);
        }
        out[0][n] = (uint32_t)c0, out[1][n] = (uint32_t)c1, out[2][n] = (uint32_t)c2, out[3][n] = (uint32_t)c3;
    }
}

// Draws of 16 bits for a lane's operand [rows, width], element e = row · width + column, as it lies: [width, rows] of
// columns. Eight elements, neighbours along the contraction, share a counter: width is a multiple of 8.
template <class W>
void draw(uint16_t* __restrict out, int64_t rows, int64_t width, bool columns, int64_t seed, int64_t step, int64_t site,
          int64_t stream) {
    uint32_t w[4][CHUNK];
    const int64_t of_row = width / 8, outer = columns ? of_row : 1, inner = columns ? rows : rows * of_row;
    for (int64_t c = 0; c < outer; c++)
        for (int64_t r = 0; r < inner; r += CHUNK) {
            const int64_t some = inner - r < CHUNK ? inner - r : CHUNK, by = columns ? of_row : 1;
            philox<W>(r * by + c, by, (W)step, (W)site, (W)seed, (W)stream, w);
            for (int j = 0; j < 4; j++) {
                uint16_t* __restrict at = out + (columns ? (8 * c + 2 * j) * rows + r : 8 * r + 2 * j);
                if (columns)
                    for (int64_t n = 0; n < some; n++) at[n] = (uint16_t)w[j][n], at[rows + n] = (uint16_t)(w[j][n] >> 16);
                else
                    for (int64_t n = 0; n < some; n++) std::memcpy(at + 8 * n, &w[j][n], 4);
            }
        }
}

// `philox.words` for a lane: [count, 4] from counter `start` on.
template <class W>
void four_words(uint32_t* __restrict out, int64_t start, int64_t count, int64_t seed, int64_t step, int64_t site,
                int64_t stream) {
    uint32_t w[4][CHUNK];
    for (int64_t c = 0; c < count; c += CHUNK) {
        const int64_t some = count - c < CHUNK ? count - c : CHUNK;
        philox<W>(start + c, 1, (W)step, (W)site, (W)seed, (W)stream, w);
        for (int j = 0; j < 4; j++)
            for (int64_t n = 0; n < some; n++) out[4 * (c + n) + j] = w[j][n];
    }
}

}  // namespace
