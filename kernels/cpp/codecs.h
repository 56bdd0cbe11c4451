// A function for each codec of `codecs/`, of the same name: from the blocks of a lane to their encoding.

#pragma once

#include "blocks.h"

namespace {

// `out`, or `other` in the blocks where its error is smaller, with their scales and multipliers (`block.block`). All
// elements are decoded, and lie as x does.
void keep_better(const Lane& b, float* out, const float* other, float* scale, const float* scale2, float* mult,
                 const float* mult2) {
    constexpr int64_t TOGETHER = 4096;  // elements of blocks side by side
    const float *__restrict x = b.x, dec = *b.dec;
    const bool absolute = b.i.adapt_mae > 0;
    const int64_t by = b.columns ? b.rows : 1, lines = b.n / by, size = b.size;
    const int64_t most = size < TOGETHER ? TOGETHER / size : 1;
    Numbers first_error(most * size), second_error(most * size);
    float *__restrict e1 = first_error.data(), *__restrict e2 = second_error.data();
    for (int64_t line = 0; line < lines; line++)
        for (int64_t r = 0; r < by; r += most) {
            const int64_t some = by - r < most ? by - r : most, first = line * size * by + r, block = line * by + r;
            const int64_t runs = some == by ? 1 : size, length = size * some / runs;  // that lie without gaps
            for (int64_t j = 0; j < runs; j++)
                for (int64_t k = 0; k < length; k++) {
                    const int64_t e = first + j * by + k;
                    const float magnitude = std::fabs(x[e]);
                    const float a = std::fabs(std::fabs(out[e]) * dec - magnitude);
                    const float c = std::fabs(std::fabs(other[e]) * dec - magnitude);
                    e1[j * length + k] = absolute ? a : a * a, e2[j * length + k] = absolute ? c : c * c;
                }
            for (int64_t left = size; left > 1; left -= left / 2)  // `sums.lane_sum` of each block
                for (int64_t e = 0, half = left / 2 * some, from = left * some - half; e < half; e++)
                    e1[e] += e1[from + e], e2[e] += e2[from + e];
            for (int64_t k = 0; k < some; k++)
                if (e2[k] < e1[k]) {
                    scale[block + k] = scale2[block + k], mult[block + k] = mult2[block + k];
                    for (int64_t j = 0; j < size; j++) out[first + j * by + k] = other[first + j * by + k];
                }
        }
}

// `block.block` of blocks that are scaled by these maxima.
void block_by(const Lane& b, const float* maxima) {
    Numbers mult(b.n);
    scales(b, maxima, b.f.inv_val_max, b.scale, mult.data());
    const bool adaptive = b.i.adapt > 0;
    elements(b, mult.data(), b.decoded || adaptive ? b.scale : nullptr, b.out);
    if (!adaptive) return;
    Numbers scale2(b.n), mult2(b.n), other(b.n * b.size);
    scales(b, maxima, b.f.inv_val_max * 1.5f, scale2.data(), mult2.data());
    elements(b, mult2.data(), scale2.data(), other.data());
    keep_better(b, b.out, other.data(), b.scale, scale2.data(), mult.data(), mult2.data());
    if (!b.decoded) elements(b, mult.data(), nullptr, b.out);
}

void block(const Lane& b) { block_by(b, b.amax); }

void table(const Lane& b) { block(b); }

void softmax(const Lane& b) {
    constexpr float SHARPNESS = 80.0f;
    Numbers soft(b.n), exponentials(b.size);
    float* __restrict v = exponentials.data();
    with_size(b.size, [&](auto size) {
        for (int64_t k = 0; k < b.n; k++) {
            const float a = b.amax[k], unit = a > 0.0f ? a : 1.0f;
            const float* __restrict x = b.x + k * size;
            for (int64_t j = 0; j < size; j++) v[j] = exp_nonpositive(SHARPNESS * (std::fabs(x[j]) / unit - 1.0f));
            soft[k] = tree_sum(v, size);
        }
    });
    for (int64_t k = 0; k < b.n; k++) soft[k] = b.amax[k] * (1.0f + natural_log(soft[k]) * (float)(1.0 / SHARPNESS));
    block_by(b, soft.data());
}

// Multipliers of scales that are their inverses, times prescale; then the elements.
void by_inverse_scales(const Lane& b) {
    Numbers mult(b.n);
    for (int64_t k = 0; k < b.n; k++) mult[k] = multiplier(b.scale[k], 1.0f) * prescale(b, k);
    elements(b, mult.data(), b.decoded ? b.scale : nullptr, b.out);
}

inline float safe_unit(float amax) { return at_most(at_least(power_below(amax), FLT_MIN), 0x1p126f); }  // `quest.safe_unit`

void quest(const Lane& b) {
    constexpr float SHARE = (float)(2.92247856 / 6), LEAST = 1e-8f;
    Numbers centred(b.size), squares(b.size);
    float *__restrict z = centred.data(), *__restrict v = squares.data();
    with_size(b.size, [&](auto size) {
        for (int64_t k = 0; k < b.n; k++) {
            const float unit = safe_unit(b.amax[k]), inverse = inverse_of_power(unit), count = (float)(int64_t)size;
            const float* __restrict x = b.x + k * size;
            for (int64_t j = 0; j < size; j++) z[j] = v[j] = x[j] * inverse;
            const float mean = tree_sum(v, size) / count;
            for (int64_t j = 0; j < size; j++) v[j] = (z[j] - mean) * (z[j] - mean);
            const float deviation = std::sqrt(tree_sum(v, size) / count) * unit;
            b.scale[k] = at_most(power_below(deviation * SHARE + LEAST), 0x1p127f);
        }
    });
    by_inverse_scales(b);
}

void sawb(const Lane& b) {
    constexpr float RMS = 12.68f, MEAN = -12.80f;
    Numbers magnitudes(b.size), squares(b.size);
    float *__restrict z = magnitudes.data(), *__restrict v = squares.data();
    const float count = (float)b.unpadded;
    for (int64_t k = 0; k < b.n; k++) {
        const float unit = safe_unit(b.amax[k]), inverse = inverse_of_power(unit);
        const float* __restrict x = b.x + k * b.size;
        for (int64_t j = 0; j < b.size; j++) z[j] = std::fabs(x[j] * inverse), v[j] = z[j] * z[j];
        const float rms = std::sqrt(tree_sum(v, b.size) / count), mean = tree_sum(z, b.size) / count;
        const float clip = rms * RMS + mean * MEAN;
        b.scale[k] = (clip < rms ? rms : clip) / b.f.elem_max * unit;
    }
    by_inverse_scales(b);
}

void macro(const Lane& b) {
    const int64_t share = MACRO_BLOCK / b.size;  // blocks, of which there are whole groups
    Numbers mult(b.n);
    for (int64_t first = 0; first < b.n; first += share) {
        uint32_t largest = 0;
        for (int64_t k = first; k < first + share; k++) largest = bits(b.amax[k]) > largest ? bits(b.amax[k]) : largest;
        const float ideal = b.f.elem_max / number(largest);
        const float factor = largest < EXPONENT ? number((bits(ideal) & 0x007f8000u) | 0x3f800000u) : NaN;
        for (int64_t k = first; k < first + share; k++) {
            const float power = e8m0(b.amax[k] * factor, b.i.e8m0_carry, b.i.e8m0_offset);
            b.scale[k] = power / factor, mult[k] = factor / power * prescale(b, k);
        }
        if (b.meta[0]) b.meta[0][first / share] = factor;
    }
    elements(b, mult.data(), b.decoded ? b.scale : nullptr, b.out);
}

void split(const Lane& b) {
    const int64_t size = b.size, count = b.n * size;
    Numbers high(b.n), low(b.n), positive(b.n), negative(b.n), up(b.n), down(b.n);
    Numbers mult(count), ones(b.decoded ? 0 : count, 1.0f);
    for (int64_t k = 0; k < b.n; k++) {
        const float* __restrict x = b.x + k * size;
        uint32_t most = 0, least = 0;
        for (int64_t j = 0; j < size; j++) {
            const uint32_t magnitude = bits(x[j]) & MAGNITUDE, below = bits(x[j]) & SIGN ? magnitude : 0, above = magnitude - below;
            most = above > most ? above : most, least = below > least ? below : least;
        }
        const bool whole = b.amax[k] == b.amax[k];  // NaN is the maximum of both
        high[k] = whole ? number(most) : NaN, low[k] = whole ? number(least) : NaN;
    }
    scales(b, high.data(), b.f.inv_val_max, positive.data(), up.data());
    scales(b, low.data(), b.f.inv_val_max, negative.data(), down.data());
    for (int64_t k = 0; k < b.n; k++) {
        const float *__restrict x = b.x + k * size, s[] = {positive[k], negative[k]}, m[] = {up[k], down[k]};
        float *__restrict scale = b.scale + k * size, *__restrict of = mult.data() + k * size;
        for (int64_t j = 0; j < size; j++) {
            const bool is_negative = bits(x[j]) & SIGN;
            scale[j] = is_negative ? s[1] : s[0], of[j] = is_negative ? m[1] : m[0];
        }
    }
    Lane one_by_one = b;  // elements have scales of their own
    one_by_one.columns = true, one_by_one.rows = count, one_by_one.width = one_by_one.size = 1;
    elements(one_by_one, mult.data(), b.decoded ? b.scale : ones.data(), b.out);
    for (int m = 0; m < 2; m++)
        if (b.meta[m]) std::memcpy(b.meta[m], (m ? negative : positive).data(), sizeof(float) * b.n);
}

void eden(const Lane& b) {
    constexpr float LARGEST = 0x1p48f;
    const bool up = b.i.scale_up > 0, by_chance = b.i.scale_stochastic > 0 && b.scale_random;
    Numbers mult(b.n), squares(b.size), products(b.size);
    float *__restrict v = squares.data(), *__restrict w = products.data();
    scales(b, b.amax, b.f.inv_val_max, b.scale, mult.data(), false);
    elements(b, mult.data(), nullptr, b.out);
    with_size(b.size, [&](auto size) {
        for (int64_t k = 0; k < b.n; k++) {
            const float *__restrict x = b.x + k * size, scale = b.scale[k], m = mult[k];
            float* __restrict q = b.out + k * size;
            for (int64_t j = 0; j < size; j++) {
                const float y = at_most(std::fabs(x[j]) * m, LARGEST);
                v[j] = y * y, w[j] = y * std::fabs(q[j]);
            }
            const float norm = tree_sum(v, size), product = tree_sum(w, size);
            const float wanted = (product == 0.0f) | (scale == 0.0f) ? scale : scale * (norm / product);
            const float least = at_most(wanted, b.f.scale_max);
            const float stored = by_chance ? round_scale<true>(least, b.f, up, b.scale_random[k])
                                           : round_scale<false>(least, b.f, up, 0);
            b.scale[k] = stored;
            if (b.decoded) for (int64_t j = 0; j < size; j++) q[j] *= stored;
        }
    });
}

void hif4(const Lane& b) {
    constexpr float SCALE_MIN = 0x1p-48f, SCALE_MAX = 0x1.8p15f, SEVENTH = 0.142578125f;
    const Grid grid(b);
    float x[64], down[64], y[64], v16[16], v8[8];
    for (int64_t k = 0; k < b.n; k++) {
        const float* from = b.x + 64 * k;
        float* q = b.out + 64 * k;
        for (int j = 0; j < 64; j++) x[j] = keep_mantissa(std::fabs(from[j]), 7);
        const auto maxima = [](const float* of, float* into, int parts, int size) {
            for (int p = 0; p < parts; p++) {
                into[p] = of[p * size];
                for (int j = 1; j < size; j++) into[p] = bits(of[p * size + j]) > bits(into[p]) ? of[p * size + j] : into[p];
            }
        };
        float largest;
        maxima(x, v16, 16, 4), maxima(v16, v8, 8, 2), maxima(v8, &largest, 1, 8);
        const float wanted = at_most(at_least(keep_mantissa(largest * SEVENTH, 7), SCALE_MIN), SCALE_MAX);
        const float scale = keep_mantissa(wanted, 2), r = keep_mantissa(1.0f / scale, 7), pre = prescale(b, k);
        for (int p = 0; p < 16; p++) {
            const float half = v8[p / 2] * r >= 4.0f ? 0.5f : 1.0f, by = v16[p] * r * half >= 2.0f ? half * 0.5f : half;
            for (int j = 4 * p; j < 4 * p + 4; j++) down[j] = by;
            if (b.meta[0]) b.meta[0][8 * k + p / 2] = half == 0.5f;
            if (b.meta[1]) b.meta[1][16 * k + p] = by != half;
        }
        for (int j = 0; j < 64; j++) y[j] = at_most(x[j] * r * down[j] * pre, grid.max);
        rounded(b, k, y, q, grid);
        const float by = b.decoded ? scale : 1.0f;
        for (int j = 0; j < 64; j++) q[j] = with_sign(q[j] / down[j], from[j]) * by;
        b.scale[k] = scale;
    }
}

void if4(const Lane& b) {
    const Grid grid(b);
    Grid integers(b);
    integers.pmin = INT4_PMIN, integers.ulps = INT4_ULPS, integers.inv_ulps = 1.0f / INT4_ULPS, integers.max = INFINITY;
    Numbers mult(b.n), payload(b.size), reals(b.size), wholes(b.size), errors(b.size);
    float *__restrict z = payload.data(), *__restrict real = reals.data(), *__restrict whole = wholes.data();
    float* __restrict v = errors.data();
    scales(b, b.amax, b.f.inv_val_max, b.scale, mult.data());
    with_size(b.size, [&](auto size) {
        for (int64_t k = 0; k < b.n; k++) {
            const float *__restrict x = b.x + k * size, m = mult[k], by = b.decoded ? b.scale[k] : 1.0f;
            float* __restrict q = b.out + k * size;
            for (int64_t j = 0; j < size; j++) z[j] = at_most(std::fabs(x[j]) * m, grid.max);
            rounded(b, k, z, real, grid);
            for (int64_t j = 0; j < size; j++) v[j] = z[j] * 7.0f / grid.max;
            rounded(b, k, v, whole, integers);
            for (int64_t j = 0; j < size; j++) {
                real[j] *= 7.0f, whole[j] *= 6.0f;
                v[j] = (whole[j] - real[j]) * (whole[j] + real[j] - 2.0f * (z[j] * 7.0f));
            }
            const bool integer = tree_sum(v, size) < 0.0f;
            for (int64_t j = 0; j < size; j++) {
                const float one = whole[j], other = real[j];
                q[j] = with_sign(integer ? one : other, x[j]) * by;
            }
            if (b.meta[0]) b.meta[0][k] = integer;
        }
    });
}

void mixfp4(const Lane& b) {
    const Grid grid(b);
    Grid integers(b);
    integers.pmin = INT4_PMIN, integers.ulps = INT4_ULPS, integers.inv_ulps = 1.0f / INT4_ULPS, integers.max = INT4_MAX;
    Numbers mult(b.n), scale2(b.n), mult2(b.n), payload(b.size), reals(b.size), wholes(b.size), first(b.size), second(b.size);
    float *__restrict z = payload.data(), *__restrict real = reals.data(), *__restrict whole = wholes.data();
    float *__restrict v = first.data(), *__restrict w = second.data();
    scales(b, b.amax, b.f.inv_val_max, b.scale, mult.data());
    scales(b, b.amax, b.f.inv_val_max * grid.max / integers.max, scale2.data(), mult2.data());
    with_size(b.size, [&](auto size) {
        for (int64_t k = 0; k < b.n; k++) {
            const float *__restrict x = b.x + k * size, m = mult[k], m2 = mult2[k], ratio = scale2[k] / b.scale[k];
            float* __restrict q = b.out + k * size;
            for (int64_t j = 0; j < size; j++) z[j] = std::fabs(x[j]) * m, v[j] = at_most(z[j], grid.max);
            rounded(b, k, v, real, grid);
            for (int64_t j = 0; j < size; j++) w[j] = at_most(std::fabs(x[j]) * m2, integers.max);
            rounded(b, k, w, whole, integers);
            for (int64_t j = 0; j < size; j++) {
                const float one = real[j] - z[j], other = whole[j] * ratio - z[j];
                v[j] = one * one, w[j] = other * other;
            }
            const bool is_real = tree_sum(v, size) < tree_sum(w, size);
            b.scale[k] = is_real ? b.scale[k] : scale2[k];
            const float by = b.decoded ? b.scale[k] : 1.0f;
            for (int64_t j = 0; j < size; j++) {
                const float one = real[j], other = whole[j];
                q[j] = with_sign(is_real ? one : other, x[j]) * by;
            }
            if (b.meta[0]) b.meta[0][k] = !is_real;
        }
    });
}

void razer(const Lane& b) {
    constexpr float SPECIAL = 5.0f;
    const Grid grid(b);
    Numbers mult(b.n), payload(b.size), gains(b.size), sums(b.size);
    float *__restrict z = payload.data(), *__restrict gain = gains.data(), *__restrict v = sums.data();
    scales(b, b.amax, b.f.inv_val_max, b.scale, mult.data());
    with_size(b.size, [&](auto size) {
        for (int64_t k = 0; k < b.n; k++) {
            const float *__restrict x = b.x + k * size, m = mult[k], by = b.decoded ? b.scale[k] : 1.0f;
            float* __restrict q = b.out + k * size;
            for (int64_t j = 0; j < size; j++) {
                z[j] = at_most(std::fabs(x[j]) * m, grid.max);
                gain[j] = at_least(1.0f - 2.0f * std::fabs(z[j] - SPECIAL), 0.0f);
                v[j] = x[j] < 0.0f ? -gain[j] : gain[j];
            }
            const bool minus = tree_sum(v, size) < 0.0f;
            const float side = minus ? -1.0f : 1.0f;
            rounded(b, k, z, q, grid);
            for (int64_t j = 0; j < size; j++) {
                const float own = q[j], of_side = x[j] < 0.0f ? -side : side;
                const float of = gain[j] * of_side > 0.0f ? SPECIAL : own;
                q[j] = ((x[j] < 0.0f ? -of : of) + 0.0f) * by;  // there is no -0
            }
            if (b.meta[0]) b.meta[0][k] = minus ? -SPECIAL : SPECIAL;
        }
    });
}

void dialects(const Lane& b) {
    float squares[16][16];  // of what each dialect adds to 0 … 15 halves
    for (int z = 0; z < 16; z++)
        for (int d = 0; d < 16; d++) squares[z][d] = (b.nearest[16 * d + z] - z) * (b.nearest[16 * d + z] - z);
    for (int64_t k = 0; k < b.n; k++) {
        const float* __restrict x = b.x + k * b.size;
        float* __restrict q = b.out + k * b.size;
        const float scale = e8m0(b.amax[k] * b.enc, b.i.e8m0_carry, b.i.e8m0_offset);
        const float mult = multiplier(scale, 1.0f / b.enc) * prescale(b, k), by = b.decoded ? scale : 1.0f;
        float error[16] = {};
        for (int64_t j = 0; j < b.size; j++) q[j] = at_most(std::rint(std::fabs(x[j]) * mult * 2.0f), 15.0f);
        for (int64_t j = 0; j < b.size; j++)
            for (int d = 0; d < 16; d++) error[d] += squares[q[j] == q[j] ? (int)q[j] : 0][d];  // exact in any order
        int dialect = 0;
        for (int d = 1; d < 16; d++) dialect = error[d] < error[dialect] ? d : dialect;
        const float* nearest = b.nearest + 16 * dialect;
        for (int64_t j = 0; j < b.size; j++)
            q[j] = with_sign(q[j] == q[j] ? nearest[(int)q[j]] * 0.5f : q[j], x[j]) * by;
        b.scale[k] = scale;
        if (b.meta[0]) b.meta[0][k] = dialect;
    }
}

void radix4(const Lane& b) {
    Numbers mult(b.n);
    scales(b, b.amax, b.f.inv_val_max, b.scale, mult.data());
    const float pmin = b.f.elem_pmin, max = b.f.elem_max;
    const int32_t least = (int32_t)(bits(pmin) >> 23), shift = b.i.random_shift;
    const auto run = [&](auto by_chance) {
        for (int64_t k = 0; k < b.n; k++) {
            const float *__restrict x = b.x + k * b.size, m = mult[k], by = b.decoded ? b.scale[k] : 1.0f;
            const uint16_t* __restrict drawn = b.random + k * b.size;
            float* __restrict q = b.out + k * b.size;
            for (int64_t j = 0; j < b.size; j++) {
                const float y = at_most(std::fabs(x[j]) * m, max), threshold = by_chance ? chance(drawn[j], shift) : 0.5f;
                const int32_t exponent = (int32_t)(bits(y) & MAGNITUDE) >> 23;
                const float power = number((uint32_t)(exponent - ((exponent - least) & 1)) << 23);
                const float low = y < pmin ? 0.0f : power, step = low > 0.0f ? 3.0f * low : pmin;
                q[j] = with_sign(low + step * round_up_from((y - low) / step, threshold), x[j]) * by;
            }
        }
    };
    if (b.i.stochastic > 0 && b.random) run(std::true_type());
    else run(std::false_type());
}

void exact(const Lane& b) {
    const Grid grid(b);
    const bool scaled = b.f.tensor_target > 0.0f && b.largest > 0.0f, up = b.i.scale_up > 0;
    const bool by_chance = b.i.scale_stochastic > 0 && b.scale_random, away = b.i.half_away > 0 || b.i.stochastic > 0;
    const float of_tensor = (float)((double)b.largest / (double)b.f.tensor_target);
    const float g = scaled ? at_most(at_least(of_tensor, 0x1p-149f), FLT_MAX) : 1.0f;
    const double val_max = b.f.elem_max, unit = val_max * (double)g;
    for (int64_t k = 0; k < b.n; k++) {
        const double wanted = at_most((double)b.amax[k] / unit, (double)b.f.scale_max);
        float scale = (float)(by_chance ? round_scale<true>(wanted, b.f, up, b.scale_random[k])
                                        : round_scale<false>(wanted, b.f, up, 0));
        scale = scale == 0.0f ? b.f.scale_zero : scale;
        const double divisor = at_least((double)scale * (double)g, DBL_MIN) * (double)prescale(b, k);
        const float *__restrict x = b.x + k * b.size, by = b.decoded ? scale : 1.0f;
        float* __restrict q = b.out + k * b.size;
        for (int64_t j = 0; j < b.size; j++) {
            const double y = at_most((double)std::fabs(x[j]) / divisor, val_max);
            const double of = away ? on_grid<AWAY>(y, 0, 0.0f, grid) : on_grid<LOG_TIES>(y, 0, 0.0f, grid);
            q[j] = with_sign((float)of, x[j]) * by;
        }
        b.scale[k] = scale;
    }
    *b.dec = g;
}

}  // namespace
