// What gates a feed-forward block.
#pragma once

#include "simd.h"

namespace baton {

inline Lanes silu_of(Lanes x) {
    const Lanes e = exp_of(x < 0.0f ? x : -x);  // of -|x|: never overflows
    return x * (x < 0.0f ? e : splat(1.0f)) / (1.0f + e);
}

inline f32x16 silu16(const f32x16& x) { return each(x, silu_of); }

// GELU in its approximation by a hyperbolic tangent.
inline f32x16 gelu16(const f32x16& x) {
    const f32x16 inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + tanh16(inner));
}

}  // namespace baton
