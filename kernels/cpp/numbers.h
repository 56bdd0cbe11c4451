// Single operations, of which everything here is made: `quant/spec/grid.py`, `ops/elementary` and `ops/sums`.
//
// Every operation is a single IEEE rounding in the reference's order (-ffp-contract=off, no fast-math). NaN goes through
// as in torch: a comparison with it is false.

#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

constexpr uint32_t MAGNITUDE = 0x7fffffffu, SIGN = 0x80000000u, EXPONENT = 0x7f800000u, HALF_RANGE = 0x7f000000u;
constexpr uint64_t EXPONENT64 = 0x7ff0000000000000u, HALF_RANGE64 = 0x7fe0000000000000u, ONE64 = 0x3ff0000000000000u;
constexpr float NaN = std::numeric_limits<float>::quiet_NaN();

inline uint32_t bits(float x) { uint32_t b; std::memcpy(&b, &x, 4); return b; }
inline float number(uint32_t b) { float x; std::memcpy(&x, &b, 4); return x; }
inline uint64_t bits(double x) { uint64_t b; std::memcpy(&b, &x, 8); return b; }
inline double number(uint64_t b) { double x; std::memcpy(&x, &b, 8); return x; }

template <class T> inline T at_most(T x, T bound) { return x > bound ? bound : x; }    // NaN stays
template <class T> inline T at_least(T x, T bound) { return x < bound ? bound : x; }   // NaN stays
inline float with_sign(float x, float of) { return number((bits(x) & MAGNITUDE) | (bits(of) & SIGN)); }

inline float power_below(float y) { return number(bits(y) & EXPONENT); }
inline float inverse_of_power(float x) { return number(HALF_RANGE - bits(x)); }
inline double power_below(double y) { return number(bits(y) & EXPONENT64); }
inline double inverse_of_power(double x) { return number(HALF_RANGE64 - bits(x)); }

// The binade of y >= 0, of a grid whose smallest is pmin.
template <class T> inline T binade_of(T y, T pmin) {
    const auto own = bits(power_below(y)), least = bits(pmin);
    return number(own > least ? own : least);
}

template <class T> inline T round_up_from(T t, T threshold) {
    const T low = std::floor(t);
    return low + (t - low >= threshold ? (T)1 : (T)0);
}

inline float chance(uint32_t drawn, int32_t shift) {  // `grid.midpoint_threshold`
    return 1.0f - (float)(int32_t)(2 * (drawn >> shift) + 1) * number((uint32_t)(shift + (127 - 17)) << 23);
}

// x >= 0 rounded to so many mantissa bits: `hif4.keep_mantissa`.
inline float keep_mantissa(float x, int kept) {
    const uint32_t u = bits(x), dropped = 23 - kept;
    return number((u + ((1u << (dropped - 1)) - 1 + (u >> dropped & 1))) >> dropped << dropped);
}

// `sums.lane_sum` of n numbers, in their place.
template <class N> inline float tree_sum(float* v, N n) {
    for (int64_t left = n; left > 1;) {
        const int64_t half = left / 2;
        for (int64_t k = 0; k < half; k++) v[k] += v[left - half + k];
        left -= half;
    }
    return v[0];
}

inline float exp_nonpositive(float x) {  // `elementary.exp_nonpositive`
    constexpr float LOG2E = 1.44269504f, LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
    constexpr float COEFFICIENTS[] = {(float)(1.0 / 5040), (float)(1.0 / 720), (float)(1.0 / 120), (float)(1.0 / 24),
                                      (float)(1.0 / 6), 0.5f, 1.0f, 1.0f};
    const float y = at_least(x, -87.0f);
    const float n = std::rint(y * LOG2E), r = (y - n * LN2_HIGH) - n * LN2_LOW;
    float p = COEFFICIENTS[0];
    for (int k = 1; k < 8; k++) p = p * r + COEFFICIENTS[k];
    const int32_t exponent = (int32_t)(y == y ? n : 0.0f) + 127;
    return p * number((uint32_t)exponent << 23);
}

inline float natural_log(float x) {  // `elementary.log`
    constexpr double LN2 = 0.6931471805599453, ROOT2 = 1.4142135623730951;
    if (!(x > 0.0f)) return x == 0.0f ? -std::numeric_limits<float>::infinity() : NaN;
    const uint64_t b = bits((double)x);
    double m = number((b & 0x000fffffffffffffu) | ONE64);
    int64_t e = (int64_t)(b >> 52) - 1023;
    if (m > ROOT2) m *= 0.5, e += 1;
    const double s = (m - 1.0) / (m + 1.0), square = s * s;
    double p = 2.0 / LN2 / 9.0;
    for (int n = 7; n > 0; n -= 2) p = p * square + 2.0 / LN2 / n;
    return (float)((p * s + (double)e) * LN2);
}

}  // namespace
