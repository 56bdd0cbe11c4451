// The operands of a product on a CPU, and what stands between products, lane by lane: `reference.decode_operand` for the
// general codec, `philox.words`, `adam.adamw`, `activations.silu` and its gradient. native.py compiles and calls it.
//
// Every operation is a single IEEE rounding in the reference's order (-ffp-contract=off, no fast-math). A lane's tensors
// stay in the cache from the first read to the last write. Maxima are taken of the bits, whose order is that of
// magnitudes, with NaN above all. Loops are written for the vectors that the compiler makes of them.

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr uint32_t MAGNITUDE = 0x7fffffffu, EXPONENT = 0x7f800000u, HALF_RANGE = 0x7f000000u;

inline uint32_t bits(float x) { uint32_t b; std::memcpy(&b, &x, 4); return b; }
inline float number(uint32_t b) { float x; std::memcpy(&x, &b, 4); return x; }
inline float least(float x, float bound) { return x > bound ? bound : x; }  // NaN stays

// The columns of tables: native.py names them. It refuses lanes whose row needs a column that is not read below.
struct Floats { float FLOAT_COLUMNS; };
struct Ints { int32_t INT_COLUMNS; };
struct Levels { float value[LEVELS], bound[LEVELS - 1]; };  // what stands behind FLOATS for codec `table`
struct AdamW { float ADAMW_NUMBERS; };

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
// columns. Eight elements, neighbours along the contraction, share a counter.
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

inline float round_up_from(float t, float threshold) {
    float low = std::floor(t);
    return low + (t - low >= threshold ? 1.0f : 0.0f);
}

// Scale and multiplier of every block from its maximum: `block.block_scales`, times prescale.
void scales(const uint32_t* __restrict amax, int64_t n, float enc, bool usable, const Floats& of, const Ints& i,
            float* __restrict scale, float* __restrict mult) {
    const Floats f = of;
    const int32_t carry = i.e8m0_carry, offset = i.e8m0_offset;
    const bool encode = i.encode > 0, hybrid = i.hybrid > 0, is_float = i.float_scale > 0, up = i.scale_up > 0;
    const float to_ideal = enc * f.inv_val_max, inv_enc = 1.0f / enc, nan = std::numeric_limits<float>::quiet_NaN();
    const uint32_t pmin = bits(f.scale_pmin);
    for (int64_t b = 0; b < n; b++) {
        const float a = number(amax[b]);
        int32_t exponent = ((int32_t)(bits(a * enc) + (uint32_t)carry) >> 23) - offset;
        exponent = exponent < 0 ? 0 : exponent > 254 ? 254 : exponent;
        const float power = exponent == 0 ? 0x1p-127f : number((uint32_t)exponent << 23);
        const float ideal = a * to_ideal, wanted = least(encode ? 1.0f / ideal : ideal, f.scale_max);
        uint32_t binade = bits(wanted) & EXPONENT;
        binade = binade > pmin ? binade : pmin;
        const float t = wanted * number(HALF_RANGE - binade) * f.scale_ulps;
        const float q = up ? round_up_from(t, FLT_MIN) : std::rint(t);
        float stored = q * (number(binade) / f.scale_ulps);
        stored = stored == 0.0f ? f.scale_zero : stored;
        const float inverse = stored == 0.0f ? 0.0f : least(1.0f / stored, FLT_MAX);
        scale[b] = is_float ? (encode ? inverse : stored) : power;
        const float source = hybrid ? wanted : stored, divisor = is_float ? source : power;
        const float m = least(encode ? source * enc : 1.0f / (divisor * inv_enc), FLT_MAX);
        mult[b] = m * (usable && amax[b] < EXPONENT ? f.prescale : nan);
    }
}

enum Rounding { NEAREST, LOG_TIES, AWAY, STOCHASTIC, TABLE, TABLE_STOCHASTIC };

constexpr bool draws(Rounding how) { return how == STOCHASTIC || how == TABLE_STOCHASTIC; }

inline float chance(uint32_t drawn, int32_t shift) {  // `grid.midpoint_threshold`
    return 1.0f - (float)(int32_t)(2 * (drawn >> shift) + 1) * number((uint32_t)(shift + (127 - 17)) << 23);
}

// `round_to_levels` of y, which is no NaN.
template <Rounding how>
inline float level(float y, uint32_t drawn, const Levels& l, int32_t shift) {
    if (how == TABLE) {
        float q = l.value[0];
        for (int k = 0; k < LEVELS - 1; k++) q = y >= l.bound[k] ? l.value[k + 1] : q;
        return q;
    }
    float below = l.value[0], above = l.value[LEVELS - 1];
    for (int k = 1; k < LEVELS; k++) below = y >= l.value[k] ? l.value[k] : below;
    for (int k = LEVELS - 2; k >= 0; k--) above = y <= l.value[k] ? l.value[k] : above;
    const float inner = y < 0.0f ? above : below, outer = y < 0.0f ? below : above;
    const float low = std::fabs(inner), step = std::fabs(outer) - low;
    const float t = (std::fabs(y) - low) / (step > 0.0f ? step : 1.0f);
    return (t >= chance(drawn, shift)) & (step > 0.0f) ? outer : inner;
}

// `round_elements`, or `round_to_levels`, with the sign of x, times the scale.
template <Rounding how>
inline float element(float x, float mult, float scale, uint32_t drawn, const Floats& f, const Levels& l, float inv_ulps,
                     int32_t shift) {
    const float p = least(number(bits(x) & MAGNITUDE) * mult, f.elem_max);
    if (how == TABLE || how == TABLE_STOCHASTIC) {
        const float q = p == p ? level<how>(number(bits(p) | (bits(x) & ~MAGNITUDE)), drawn, l, shift) : p;
        return number((bits(q) & MAGNITUDE) | (bits(x) & ~MAGNITUDE)) * scale;
    }
    const uint32_t pmin = bits(f.elem_pmin);
    uint32_t binade = bits(p) & EXPONENT;
    binade = binade > pmin ? binade : pmin;
    const float t = p * number(HALF_RANGE - binade) * f.elem_ulps;
    float q;
    if (how == NEAREST) q = std::rint(t);
    if (how == LOG_TIES) q = (t == 1.5f) & !(binade >> 23 & 1) ? 1.0f : std::rint(t);
    if (how == AWAY) q = round_up_from(t, 0.5f);
    if (how == STOCHASTIC) q = round_up_from(t, chance(drawn, shift));
    q = q * (number(binade) * inv_ulps);
    return number((bits(q) & MAGNITUDE) | (bits(x) & ~MAGNITUDE)) * scale;
}

template <Rounding how, int B>
void rows_of(const float* __restrict x, float* __restrict out, int64_t blocks, int64_t any, const float* __restrict scale,
             const float* __restrict mult, const uint16_t* __restrict drawn, const Floats& of, const Levels& levels,
             int32_t shift) {
    const Floats f = of;
    const Levels l = levels;
    const float inv_ulps = 1.0f / f.elem_ulps;
    const int64_t size = B ? B : any;
    for (int64_t b = 0; b < blocks; b++) {
        const float m = mult[b], s = scale[b];
        for (int64_t j = 0; j < size; j++) {
            const int64_t e = b * size + j;
            out[e] = element<how>(x[e], m, s, draws(how) ? drawn[e] : 0, f, l, inv_ulps, shift);
        }
    }
}

template <Rounding how>
void decode(const float* x, float* out, int64_t rows, int64_t width, int64_t block, bool columns, const float* scale,
            const float* mult, const uint16_t* drawn, const Floats& of, const Levels& levels, int32_t shift) {
    const Floats f = of;
    const Levels l = levels;
    if (!columns) {
        const int64_t blocks = rows * width / block;
        if (block == 16) rows_of<how, 16>(x, out, blocks, block, scale, mult, drawn, f, l, shift);
        else if (block == 32) rows_of<how, 32>(x, out, blocks, block, scale, mult, drawn, f, l, shift);
        else rows_of<how, 0>(x, out, blocks, block, scale, mult, drawn, f, l, shift);
        return;
    }
    const float inv_ulps = 1.0f / f.elem_ulps;
    for (int64_t c = 0; c < width; c++) {
        const float *__restrict m = mult + c / block * rows, *__restrict s = scale + c / block * rows;
        const float* __restrict from = x + c * rows;
        const uint16_t* __restrict r16 = drawn + c * rows;
        float* __restrict to = out + c * rows;
        for (int64_t r = 0; r < rows; r++)
            to[r] = element<how>(from[r], m[r], s[r], draws(how) ? r16[r] : 0, f, l, inv_ulps, shift);
    }
}

constexpr int64_t TOGETHER = 4096;  // elements of blocks side by side

// `out`, or `other` in the blocks where its error is smaller, as `block.block` has it; both as x lies.
void keep_better(const float* __restrict x, float* __restrict out, const float* __restrict other, int64_t rows, int64_t width,
                 int64_t block, bool columns, float dec, bool absolute) {
    float error[2][TOGETHER];
    const int64_t by = columns ? rows : 1, lines = columns ? width / block : rows * width / block, most = TOGETHER / block;
    for (int64_t line = 0; line < lines; line++)
        for (int64_t r = 0; r < by; r += most) {
            const int64_t some = by - r < most ? by - r : most, first = line * block * by + r;
            for (int64_t j = 0; j < block; j++)
                for (int64_t k = 0; k < some; k++) {
                    const int64_t e = first + j * by + k;
                    const float magnitude = std::fabs(x[e]);
                    const float a = std::fabs(std::fabs(out[e]) * dec - magnitude);
                    const float b = std::fabs(std::fabs(other[e]) * dec - magnitude);
                    error[0][j * some + k] = absolute ? a : a * a, error[1][j * some + k] = absolute ? b : b * b;
                }
            for (int64_t half = block / 2; half; half /= 2)  // `reduce.lane_sum`
                for (int64_t e = 0; e < half * some; e++)
                    error[0][e] += error[0][e + half * some], error[1][e] += error[1][e + half * some];
            for (int64_t k = 0; k < some; k++)
                if (error[1][k] < error[0][k])
                    for (int64_t j = 0; j < block; j++) out[first + j * by + k] = other[first + j * by + k];
        }
}

template <int B>
void maxima_of_rows(const float* __restrict x, uint32_t* __restrict amax, int64_t blocks, int64_t any) {
    const int64_t size = B ? B : any;
    for (int64_t b = 0; b < blocks; b++) {
        uint32_t most = 0;
        for (int64_t j = 0; j < size; j++) {
            const uint32_t one = bits(x[b * size + j]) & MAGNITUDE;
            most = one > most ? one : most;
        }
        amax[b] = most;
    }
}

void maxima(const float* x, uint32_t* amax, int64_t rows, int64_t width, int64_t block, bool columns) {
    if (!columns) {
        const int64_t blocks = rows * width / block;
        if (block == 16) maxima_of_rows<16>(x, amax, blocks, block);
        else if (block == 32) maxima_of_rows<32>(x, amax, blocks, block);
        else maxima_of_rows<0>(x, amax, blocks, block);
        return;
    }
    std::memset(amax, 0, sizeof(uint32_t) * rows * (width / block));
    for (int64_t c = 0; c < width; c++) {
        uint32_t* __restrict most = amax + c / block * rows;
        const float* __restrict from = x + c * rows;
        for (int64_t r = 0; r < rows; r++) {
            const uint32_t one = bits(from[r]) & MAGNITUDE;
            most[r] = one > most[r] ? one : most[r];
        }
    }
}

const float LOG2E = 1.44269504f, LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;

inline float sigmoid(float x) {  // `activations.sigmoid`
    const float COEFFICIENTS[] = {(float)(1.0 / 5040), (float)(1.0 / 720), (float)(1.0 / 120), (float)(1.0 / 24),
                                  (float)(1.0 / 6), 0.5f, 1.0f, 1.0f};
    float y = number(bits(x) | ~MAGNITUDE);
    y = y < -87.0f ? -87.0f : y;
    const float n = std::rint(y * LOG2E), r = (y - n * LN2_HIGH) - n * LN2_LOW;
    float p = COEFFICIENTS[0];
    for (int k = 1; k < 8; k++) p = p * r + COEFFICIENTS[k];
    const int32_t exponent = (int32_t)(y == y ? n : 0.0f) + 127;
    const float e = p * number((uint32_t)exponent << 23);
    return (x >= 0.0f ? 1.0f : e) / (1.0f + e);
}

}  // namespace

extern "C" {

// x: lanes `stride` numbers apart, each [rows, width], or [width, rows] of columns; blocks lie along width. out as x,
// without gaps; dec [lanes]. levels [lanes] for codec `table`, else null; amax [lanes] or null. Lanes from `first` on, up to `last`.
void operand(const float* x, int64_t stride, int64_t rows, int64_t width, int64_t block, int columns,
             const Floats* floats, const Ints* ints, const Levels* levels, const float* amax, const int64_t* seeds,
             int64_t step, int64_t site, int64_t stream, float* out, float* dec, int64_t first, int64_t last) {
    const int64_t size = rows * width, n = size / block;
    std::vector<uint32_t> most(n);
    std::vector<float> scale(n), mult(n), other;
    std::vector<uint16_t> drawn;
    for (int64_t lane = first; lane < last; lane++) {
        const float* from = x + lane * stride;
        float* to = out + lane * size;
        Floats f = floats[lane];
        const Ints i = ints[lane];
        const Levels l = levels ? levels[lane] : Levels{};
        maxima(from, most.data(), rows, width, block, columns);
        uint32_t largest = 0;
        if (amax) largest = bits(amax[lane]);
        else for (int64_t b = 0; b < n; b++) largest = most[b] > largest ? most[b] : largest;
        const bool has_target = f.tensor_target > 0.0f;
        const float tensor = number(largest);
        const float bound = FLT_MAX / (2.0f * f.inv_val_max > 1.0f ? 2.0f * f.inv_val_max : 1.0f);
        const float wanted = least(f.tensor_target / tensor, bound);
        const float enc = has_target && tensor > 0.0f ? (wanted < FLT_MIN ? FLT_MIN : wanted) : 1.0f;
        dec[lane] = (1.0f / enc) * f.postscale;
        if (i.stochastic > 0) {
            drawn.resize(size);
            const int64_t seed = seeds[lane], top = seed | step | site | size;
            (top >> 32 ? draw<uint64_t> : draw<uint32_t>)(drawn.data(), rows, width, columns, seed, step, site, stream);
        }
        // half away goes before the rest, as in round_elements
        const auto how = levels             ? (i.stochastic > 0 ? decode<TABLE_STOCHASTIC> : decode<TABLE>)
                         : i.half_away > 0  ? decode<AWAY>
                         : i.stochastic > 0 ? decode<STOCHASTIC>
                         : i.log_ties > 0   ? decode<LOG_TIES>
                                            : decode<NEAREST>;
        const auto encode = [&](float* into) {
            scales(most.data(), n, enc, !has_target || std::isfinite(tensor), f, i, scale.data(), mult.data());
            how(from, into, rows, width, block, columns, scale.data(), mult.data(), drawn.data(), f, l, i.random_shift);
        };
        encode(to);
        if (i.adapt > 0) {
            other.resize(size);
            f.inv_val_max *= 1.5f;
            encode(other.data());
            keep_better(from, to, other.data(), rows, width, block, columns, dec[lane], i.adapt_mae > 0);
        }
    }
}

// `philox.words` [lanes, count, 4] of counters from `start` on.
void words(const int64_t* seeds, int64_t stream, int64_t step, int64_t site, int64_t start, int64_t count, uint32_t* out,
           int64_t first, int64_t last) {
    for (int64_t lane = first; lane < last; lane++) {
        const int64_t seed = seeds[lane], top = seed | stream | step | site | start | (start + count);
        const auto make = top >> 32 ? four_words<uint64_t> : four_words<uint32_t>;
        make(out + 4 * count * lane, start, count, seed, step, site, stream);
    }
}

// `adam.adamw`: tensors [lanes, n], numbers [lanes], alive [lanes], decaying [n].
void adamw(float* flat, float* mean, float* square, const float* gradient, const uint8_t* alive, const AdamW* numbers,
           const uint8_t* decaying, int64_t n, int64_t first, int64_t last) {
    for (int64_t lane = first; lane < last; lane++) {
        if (!alive[lane]) continue;
        const AdamW k = numbers[lane];
        float *__restrict w = flat + lane * n, *__restrict m = mean + lane * n, *__restrict v = square + lane * n;
        const float* __restrict g = gradient + lane * n;
        const bool decays = k.weight_decay > 0.0f;
        for (int64_t e = 0; e < n; e++) {
            const float m1 = m[e] * k.b1 + g[e] * k.past1, v1 = v[e] * k.b2 + g[e] * g[e] * k.past2;
            const float update = m1 / k.correction1 / (std::sqrt(v1 / k.correction2) + k.eps);
            const float with_decay = update + w[e] * k.weight_decay;
            m[e] = m1, v[e] = v1;
            w[e] = w[e] - k.step * (decays & (decaying[e] != 0) ? with_decay : update);
        }
    }
}

// y = x · sigmoid(x) of elements from `first` on, up to `last`.
void silu(const float* x, float* y, int64_t first, int64_t last) {
    for (int64_t e = first; e < last; e++) y[e] = x[e] * sigmoid(x[e]);
}

// The gradient of x from g, that of silu(x).
void silu_gradient(const float* x, const float* g, float* out, int64_t first, int64_t last) {
    for (int64_t e = first; e < last; e++) {
        const float s = sigmoid(x[e]);
        out[e] = g[e] * (s * (1.0f + x[e] * (1.0f - s)));
    }
}

}  // extern "C"
