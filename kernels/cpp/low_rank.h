// Rows made orthonormal, in float64: what kernels/quant/spec/low_rank.py does, operation by operation.

#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

// `sums.lane_sum` of n rows of so many numbers, in place: the sum is in the first row.
inline void add_rows(double* rows, int64_t n, int64_t width) {
    while (n > 1) {
        const int64_t half = n / 2;
        double *__restrict head = rows, *__restrict tail = rows + (n - half) * width;
        for (int64_t e = 0; e < half * width; e++) head[e] += tail[e];
        n -= half;
    }
}

// `low_rank.orthonormal` of one lane: rows and out [count, n].
inline void orthonormal_rows(const float* rows, float* out, int64_t count, int64_t n) {
    constexpr double DEPENDENT = 1.0 / (1LL << 40);
    const int64_t width = 2 * count;
    std::vector<double> p(rows, rows + count * n), terms(count * n), both(count * width), least(count);
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = i; j < count; j++) {
            for (int64_t e = 0; e < n; e++) terms[e] = p[i * n + e] * p[j * n + e];
            add_rows(terms.data(), n, 1);
            both[i * width + j] = both[j * width + i] = terms[0];
        }
    for (int64_t j = 0; j < count; j++) least[j] = both[j * width + j] * DEPENDENT, both[j * width + count + j] = 1.0;
    for (int64_t j = 0; j + 1 < count; j++) {
        const double* row = both.data() + j * width;
        const double inverse = row[j] > least[j] ? 1.0 / row[j] : 0.0;
        for (int64_t i = j + 1; i < count; i++) {
            double* below = both.data() + i * width;
            const double share = below[j] * inverse;
            for (int64_t k = j; k < width; k++) below[k] -= share * row[k];
        }
    }
    for (int64_t i = 0; i < count; i++) {
        const double square = both[i * width + i], *t = both.data() + i * width + count;
        for (int64_t k = 0; k < count; k++)
            for (int64_t e = 0; e < n; e++) terms[k * n + e] = t[k] * p[k * n + e];
        add_rows(terms.data(), count, n);
        const float length = static_cast<float>(std::sqrt(square > least[i] ? square : 0.0));
        for (int64_t e = 0; e < n; e++) out[i * n + e] = length > 0.0f ? static_cast<float>(terms[e] / length) : 0.0f;
    }
}
