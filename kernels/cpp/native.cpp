// Functions that native_library.py compiles and native.py calls: operands of products, random numbers, and what stands
// between products, a lane at a time. A lane's tensors stay in the cache from the first read to the last write.
//
// Each takes lanes, or elements, from `first` on, up to `last`.

#include "codecs.h"
#include "low_rank.h"
#include "philox.h"

namespace {

struct AdamW { float ADAMW_NUMBERS; };
struct Call { CALL_FIELDS };  // what an operand is quantized by: native_library.py says what each is

constexpr void (*CODECS[])(const Lane&) = {CODEC_NAMES};

// The tensor factor that maxima of this tensor call for: `reference.with_numbers`.
float tensor_factor(const Floats& f, float largest) {
    const float reach = 2.0f * f.inv_val_max, bound = 1.0f / at_least(reach, 1.0f) * FLT_MAX;
    const float wanted = at_most(at_least(f.tensor_target / largest, FLT_MIN), bound);
    return f.tensor_target > 0.0f && largest > 0.0f ? wanted : 1.0f;
}

float sigmoid(float x) {  // `silu.sigmoid`
    const float e = exp_nonpositive(number(bits(x) | SIGN));
    return (x >= 0.0f ? 1.0f : e) / (1.0f + e);
}

}  // namespace

extern "C" {

// `reference.quantize_blocks` and `decode_operand`, of lanes in parts that have a tensor factor each.
void quantize(const Call* call, int64_t first, int64_t last) {
    const Call& c = *call;
    const int64_t elements = c.rows * c.width, size = elements / c.factors, n = size / c.block;
    Numbers amax(n), scale(c.scale ? 0 : c.scales / c.factors);
    std::vector<uint16_t> drawn;
    Lane b;
    b.rows = c.rows / (c.columns ? 1 : c.factors), b.width = c.width, b.size = c.block, b.n = n, b.columns = c.columns;
    b.unpadded = c.unpadded, b.nearest = c.nearest, b.decoded = c.decoded;
    for (int64_t lane = first; lane < last; lane++) {
        b.f = c.floats[lane], b.i = c.ints[lane], b.levels = c.levels ? c.levels + lane : nullptr;
        const uint16_t* random = c.random ? c.random + lane * elements : nullptr;
        if (b.i.stochastic > 0 && c.seeds) {
            const int64_t seed = c.seeds[lane], top = seed | c.step | c.site | elements, padded = (elements + 7) / 8 * 8;
            const int64_t rows = c.columns ? c.rows : 1, width = c.columns ? c.width : padded;
            drawn.resize(padded), random = drawn.data();
            const auto make = top >> 32 ? draw<uint64_t> : draw<uint32_t>;
            make(drawn.data(), rows, width, c.columns, seed, c.step, c.site, c.stream);
        }
        for (int64_t part = 0; part < c.factors; part++) {
            const int64_t at = lane * c.factors + part, from = part * size;
            b.x = c.x + lane * c.stride + from;
            b.amax = amax.data(), b.random = random ? random + from : nullptr;
            b.scale_random = c.scale_random ? c.scale_random + at * n : nullptr;
            b.guide = c.guide ? c.guide + at * size : nullptr;
            b.out = c.out + at * size, b.scale = c.scale ? c.scale + at * (c.scales / c.factors) : scale.data();
            b.dec = c.dec + at;
            for (int m = 0; m < 2; m++) {
                float* all = m ? c.meta2 : c.meta1;
                b.meta[m] = all ? all + at * ((m ? c.metas2 : c.metas1) / c.factors) : nullptr;
            }
            maxima(b.x, amax.data(), b.rows, b.width, b.size, b.columns);
            uint32_t largest = 0;
            for (int64_t k = 0; k < n; k++) largest = bits(amax[k]) > largest ? bits(amax[k]) : largest;
            b.largest = number(largest);
            const float tensor = c.amax ? c.amax[at] : b.largest;
            b.enc = tensor_factor(b.f, tensor), *b.dec = 1.0f / b.enc * b.f.postscale;
            b.usable = !(b.f.tensor_target > 0.0f) || std::isfinite(tensor);
            CODECS[c.codec](b);
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

// `ops.adamw`: tensors [lanes, n], numbers [lanes], alive [lanes], decaying [n] or null.
void adamw(float* flat, float* mean, float* square, const float* gradient, const uint8_t* alive, const AdamW* numbers,
           const uint8_t* decaying, int64_t n, int64_t first, int64_t last) {
    for (int64_t lane = first; lane < last; lane++) {
        if (!alive[lane]) continue;
        const AdamW k = numbers[lane];
        float *__restrict w = flat + lane * n, *__restrict m = mean + lane * n, *__restrict v = square + lane * n;
        const float* __restrict g = gradient + lane * n;
        const bool decays = decaying && k.weight_decay > 0.0f;
        for (int64_t e = 0; e < n; e++) {
            const float m1 = m[e] * k.b1 + g[e] * k.past1, v1 = v[e] * k.b2 + g[e] * g[e] * k.past2;
            const float update = m1 / k.correction1 / (std::sqrt(v1 / k.correction2) + k.eps);
            const float with_decay = update + w[e] * k.weight_decay;
            m[e] = m1, v[e] = v1;
            w[e] = w[e] - k.step * (decays && decaying[e] != 0 ? with_decay : update);
        }
    }
}

// y = x · sigmoid(x).
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

// `low_rank.orthonormal` of rows [lanes, count, n].
void orthonormal(const float* rows, float* out, int64_t count, int64_t n, int64_t first, int64_t last) {
    for (int64_t lane = first; lane < last; lane++)
        orthonormal_rows(rows + lane * count * n, out + lane * count * n, count, n);
}

}  // extern "C"
