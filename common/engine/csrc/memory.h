// Memory that grows and never shrinks, from the begin of a cache line on.
#pragma once

#include <cstdint>
#include <vector>

namespace baton {

template <class E>
E* at_least(std::vector<E>& memory, int64_t count) {
    constexpr int64_t kLine = 64;
    const int64_t needed = count + kLine / static_cast<int64_t>(sizeof(E));
    if (static_cast<int64_t>(memory.size()) < needed) memory.resize(needed);
    return reinterpret_cast<E*>((reinterpret_cast<uintptr_t>(memory.data()) + kLine - 1) / kLine * kLine);
}

}  // namespace baton
