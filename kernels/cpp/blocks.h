// What codecs are made of: the blocks of a lane, their maxima, scales and rounded elements (`codecs/block.py`, `grid.py`).
//
// Maxima are taken of the bits, whose order is that of magnitudes, with NaN above all. Loops are written for the vectors
// that the compiler makes of them.

#pragma once

#include <type_traits>
#include <vector>

#include "numbers.h"

namespace {

// The columns of tables: native_library.py names them. native.py refuses lanes whose row needs one that is not read here.
struct Floats { float FLOAT_COLUMNS; };
struct Ints { int32_t INT_COLUMNS; };
struct Levels { float value[LEVELS], bound[LEVELS - 1]; };  // what stands behind FLOATS for codec `table`

// `codecs.Blocks` of a lane, or of a part of it that has a tensor factor of its own, and where its encoding goes.
struct Lane {
    Floats f;
    Ints i;
    const Levels* levels;      // null: float formats
    int64_t rows, width, size; // [rows, width], or [width, rows] of columns; blocks of so many lie along width
    int64_t n;                 // blocks
    bool columns;
    const float* x;
    const float* amax;         // maxima of blocks, [width / size, rows] of columns
    float largest;             // of these
    float enc;
    bool usable;               // the tensor maximum is finite, or of no use
    const uint16_t *random, *scale_random;  // null: not by chance
    const float* guide;        // or null
    int64_t unpadded;          // elements of a block that are not padding
    const float* nearest;      // `dialects.NEAREST`
    bool decoded;              // out is q · scale, else q
    float* out;
    float* scale;              // a number for each block; of `split` for each element
    float* dec;                // the tensor's decode factor
    float* meta[2];            // what else is stored; null: it is not asked for
};

using Numbers = std::vector<float>;

// f of a number of elements that the compiler knows where it is a usual one.
template <class F> void with_size(int64_t size, F f) {
    if (size == 16) f(std::integral_constant<int64_t, 16>());
    else if (size == 32) f(std::integral_constant<int64_t, 32>());
    else f(size);
}

inline bool is_finite(float amax) { return bits(amax) < EXPONENT; }  // of a magnitude

// What elements of a block are multiplied by beside all else: `Blocks.prescale`.
inline float prescale(const Lane& b, int64_t block) { return b.usable && is_finite(b.amax[block]) ? b.f.prescale : NaN; }

inline float multiplier(float scale, float inv_enc) { return at_most(1.0f / (scale * inv_enc), FLT_MAX); }

// `block.least_exponent`.
inline int32_t least_exponent(const Floats& f) {
    const int32_t least = 127 + SMALLEST - ((int32_t)(bits(f.elem_pmin) >> 23) - (int32_t)(bits(f.elem_ulps) >> 23));
    return least < 0 ? 0 : least;
}

inline float e8m0(float amax, int32_t carry, int32_t offset, int32_t least = 0) {
    int32_t exponent = ((int32_t)(bits(amax) + (uint32_t)carry) >> 23) - offset;
    exponent = exponent < least ? least : exponent > 254 ? 254 : exponent;
    return exponent == 0 ? 0x1p-127f : number((uint32_t)exponent << 23);
}

// `grid.round_scale`, by chance with random bits `drawn`.
template <bool by_chance, class T> inline T round_scale(T y, const Floats& f, bool up, uint32_t drawn) {
    const T binade = binade_of(y, (T)f.scale_pmin), t = y * inverse_of_power(binade) * (T)f.scale_ulps;
    const T q = by_chance ? round_up_from<T>(t, chance(drawn, 0)) : up ? round_up_from<T>(t, FLT_MIN) : std::rint(t);
    return q * (binade / (T)f.scale_ulps);
}

template <bool by_chance>
void general_scales(const Lane& b, const float* __restrict maxima, float inv_val_max, float* __restrict scale,
                    float* __restrict mult) {
    const Floats f = b.f;
    const int32_t carry = b.i.e8m0_carry, offset = b.i.e8m0_offset, least = least_exponent(f);
    const bool encode = b.i.encode > 0, hybrid = b.i.hybrid > 0, is_float = b.i.float_scale > 0, up = b.i.scale_up > 0;
    const float enc = b.enc, to_ideal = enc * inv_val_max, inv_enc = 1.0f / enc, usable = b.usable ? f.prescale : NaN;
    const float* __restrict amax = b.amax;
    for (int64_t k = 0; k < b.n; k++) {
        const float a = maxima[k], power = e8m0(a * enc, carry, offset, least);
        const float ideal = a * to_ideal, wanted = at_most(encode ? 1.0f / ideal : ideal, f.scale_max);
        float stored = round_scale<by_chance>(wanted, f, up, by_chance ? b.scale_random[k] : 0);
        stored = stored == 0.0f ? f.scale_zero : stored;
        const float inverse = stored == 0.0f ? 0.0f : at_most(1.0f / stored, FLT_MAX);
        scale[k] = is_float ? (encode ? inverse : stored) : power;
        const float source = hybrid ? wanted : stored, divisor = is_float ? source : power;
        const float m = encode ? at_most(source * enc, FLT_MAX) : multiplier(divisor, inv_enc);
        mult[k] = m * (is_finite(amax[k]) ? usable : NaN);
    }
}

// Scale of every block by its maximum, and what its elements are multiplied by: `block.block_scales`, times prescale.
void scales(const Lane& b, const float* maxima, float inv_val_max, float* scale, float* mult, bool chance = true) {
    const bool by_chance = chance && b.i.scale_stochastic > 0 && b.scale_random;
    (by_chance ? general_scales<true> : general_scales<false>)(b, maxima, inv_val_max, scale, mult);
}

// --- Elements

enum Rounding { NEAREST, LOG_TIES, AWAY, STOCHASTIC, AVERAGED, TABLE, TABLE_STOCHASTIC, TABLE_AVERAGED };

constexpr bool draws(Rounding how) { return how == STOCHASTIC || how == TABLE_STOCHASTIC; }
constexpr bool follows(Rounding how) { return how == AVERAGED || how == TABLE_AVERAGED; }
constexpr bool of_table(Rounding how) { return how == TABLE || how == TABLE_STOCHASTIC || how == TABLE_AVERAGED; }

// How a lane rounds: what goes before what is as in `round_elements` and `round_to_levels`.
Rounding rounding(const Lane& b, bool guided) {
    const bool by_chance = b.i.stochastic > 0 && b.random, follow = b.i.ema > 0 && guided;
    if (b.levels) return by_chance ? TABLE_STOCHASTIC : follow ? TABLE_AVERAGED : TABLE;
    if (b.i.half_away > 0 || (b.i.stochastic > 0 && !by_chance)) return AWAY;
    return by_chance ? STOCHASTIC : follow ? AVERAGED : b.i.log_ties > 0 ? LOG_TIES : NEAREST;
}

// The element grid of a lane.
struct Grid {
    float pmin, ulps, max, inv_ulps;
    int32_t shift;
    bool log_ties;
    Levels levels;

    explicit Grid(const Lane& b)
        : pmin(b.f.elem_pmin), ulps(b.f.elem_ulps), max(b.f.elem_max), inv_ulps(1.0f / ulps), shift(b.i.random_shift),
          log_ties(b.i.log_ties > 0), levels(b.levels ? *b.levels : Levels{}) {}
};

// `round_to_levels` of y, which is no NaN.
template <Rounding how> inline float level(float y, uint32_t drawn, float guide, const Grid& g) {
    const Levels& l = g.levels;
    float nearest = l.value[0];
    for (int k = 0; k < LEVELS - 1; k++) nearest = y >= l.bound[k] ? l.value[k + 1] : nearest;
    if (how == TABLE) return nearest;
    float below = l.value[0], above = l.value[LEVELS - 1];
    for (int k = 1; k < LEVELS; k++) below = y >= l.value[k] ? l.value[k] : below;
    for (int k = LEVELS - 2; k >= 0; k--) above = y <= l.value[k] ? l.value[k] : above;
    const float inner = y < 0.0f ? above : below, outer = y < 0.0f ? below : above;
    const float low = std::fabs(inner), step = std::fabs(outer) - low;
    if (how == TABLE_AVERAGED) {
        const float followed = guide - low >= 0.5f * step ? outer : inner;
        return guide == guide ? followed : nearest;
    }
    const float t = (std::fabs(y) - low) / (step > 0.0f ? step : 1.0f);
    return (t >= chance(drawn, g.shift)) & (step > 0.0f) ? outer : inner;
}

// `round_elements` of magnitudes, NaN or at most the largest.
template <Rounding how, class T> inline T on_grid(T p, uint32_t drawn, float guide, const Grid& g) {
    const T binade = binade_of(p, (T)g.pmin), inverse = inverse_of_power(binade), t = p * inverse * (T)g.ulps;
    const bool tie = (t == (T)1.5) & !(bits((float)binade) >> 23 & 1);
    T q;
    if (how == NEAREST) q = std::rint(t);
    if (how == LOG_TIES) q = g.log_ties & tie ? (T)1 : std::rint(t);
    if (how == AWAY) q = round_up_from(t, (T)0.5);
    if (how == STOCHASTIC) q = round_up_from(t, (T)chance(drawn, g.shift));
    if (how == AVERAGED) {
        const T at = guide * inverse * (T)g.ulps - std::floor(t), nearest = g.log_ties & tie ? (T)1 : std::rint(t);
        const T followed = at >= (T)0.5 ? std::ceil(t) : std::floor(t);
        q = (guide == guide) & (t == t) ? followed : nearest;
    }
    return q * (binade * (T)g.inv_ulps);
}

// An element, with the sign of x.
template <Rounding how> inline float element(float x, float mult, uint32_t drawn, float guide, const Grid& g) {
    const float p = at_most(number(bits(x) & MAGNITUDE) * mult, g.max);
    const float by = follows(how) ? with_sign(guide, guide * x) * mult : 0.0f;
    if (of_table(how)) return with_sign(p == p ? level<how>(with_sign(p, x), drawn, by, g) : p, x);
    return with_sign(on_grid<how>(p, drawn, by, g), x);
}

// Elements, times the scale, of blocks that lie one after another; each with its multiplier. scale null: 1.
template <Rounding how>
void rows_of(const float* __restrict x, float* __restrict out, int64_t blocks, int64_t size, const float* __restrict mult,
             const float* __restrict scale, const uint16_t* __restrict drawn, const float* __restrict guide, const Grid& of) {
    with_size(size, [=, g = of](auto size) {
        for (int64_t k = 0; k < blocks; k++) {
            const float m = mult[k], s = scale ? scale[k] : 1.0f;
            for (int64_t j = 0; j < size; j++) {
                const int64_t e = k * size + j;
                out[e] = element<how>(x[e], m, draws(how) ? drawn[e] : 0, follows(how) ? guide[e] : 0.0f, g) * s;
            }
        }
    });
}

// The same of blocks that lie side by side, as many as there are rows.
template <Rounding how>
void columns_of(const float* __restrict x, float* __restrict out, int64_t rows, int64_t width, int64_t size,
                const float* mult, const float* scale, const uint16_t* drawn, const float* guide, const Grid& of) {
    const Grid g = of;
    for (int64_t c = 0; c < width; c++) {
        const float *__restrict m = mult + c / size * rows, *__restrict s = scale + c / size * rows;
        const float *__restrict from = x + c * rows, *__restrict by = guide + c * rows;
        const uint16_t* __restrict r16 = drawn + c * rows;
        float* __restrict to = out + c * rows;
        for (int64_t r = 0; r < rows; r++)
            to[r] = element<how>(from[r], m[r], draws(how) ? r16[r] : 0, follows(how) ? by[r] : 0.0f, g) * s[r];
    }
}

template <class F> void with_rounding(Rounding how, F f) {
    switch (how) {
        case NEAREST: return f(std::integral_constant<Rounding, NEAREST>());
        case LOG_TIES: return f(std::integral_constant<Rounding, LOG_TIES>());
        case AWAY: return f(std::integral_constant<Rounding, AWAY>());
        case STOCHASTIC: return f(std::integral_constant<Rounding, STOCHASTIC>());
        case AVERAGED: return f(std::integral_constant<Rounding, AVERAGED>());
        case TABLE: return f(std::integral_constant<Rounding, TABLE>());
        case TABLE_STOCHASTIC: return f(std::integral_constant<Rounding, TABLE_STOCHASTIC>());
        case TABLE_AVERAGED: return f(std::integral_constant<Rounding, TABLE_AVERAGED>());
    }
}

// Elements of all blocks with multipliers [n], times the scales [n]; scales null: 1, for blocks that are no columns.
void elements(const Lane& b, const float* mult, const float* scale, float* out) {
    with_rounding(rounding(b, b.guide), [&](auto how) {
        if (b.columns) columns_of<how>(b.x, out, b.rows, b.width, b.size, mult, scale, b.random, b.guide, Grid(b));
        else rows_of<how>(b.x, out, b.n, b.size, mult, scale, b.random, b.guide, Grid(b));
    });
}

// `round_elements` of magnitudes y [size], those of one block, at most g.max.
void rounded(const Lane& b, int64_t block, const float* y, float* out, const Grid& g) {
    const float one = 1.0f;
    const uint16_t* drawn = b.random ? b.random + block * b.size : nullptr;
    with_rounding(rounding(b, false), [&](auto how) { rows_of<how>(y, out, 1, b.size, &one, nullptr, drawn, nullptr, g); });
}

// Maxima of blocks, as `Lane.amax` has them.
void maxima(const float* __restrict x, float* __restrict amax, int64_t rows, int64_t width, int64_t size, bool columns) {
    if (!columns) {
        with_size(size, [&](auto size) {
            const int64_t n = rows * width / size;
            for (int64_t k = 0; k < n; k++) {
                uint32_t most = 0;
                for (int64_t j = 0; j < size; j++) {
                    const uint32_t one = bits(x[k * size + j]) & MAGNITUDE;
                    most = one > most ? one : most;
                }
                amax[k] = number(most);
            }
        });
        return;
    }
    std::memset(amax, 0, sizeof(float) * rows * (width / size));
    for (int64_t c = 0; c < width; c++) {
        float* __restrict most = amax + c / size * rows;
        const float* __restrict from = x + c * rows;
        for (int64_t r = 0; r < rows; r++) {
            const uint32_t one = bits(from[r]) & MAGNITUDE, before = bits(most[r]);
            most[r] = number(one > before ? one : before);
        }
    }
}

}  // namespace
