// P(Z > z) of a normal Z to 3e-7, without an exponential (Abramowitz and Stegun, 7.1.28).
#pragma once

#include <cmath>

namespace eplb {

inline float normal_tail(float z) {
    const float y = std::abs(z) * 0.70710678f;
    float d = 1 + y * (0.0705230784f +
                       y * (0.0422820123f +
                            y * (0.0092705272f + y * (0.0001520143f + y * (0.0002765672f + y * 0.0000430638f)))));
    d *= d, d *= d, d *= d, d *= d;
    const float below = z < 0 ? 1.0f : 0.0f;  // no branch around arithmetic, which would not be vectorised
    return below + (1 - 2 * below) * (0.5f / d);
}

}  // namespace eplb
