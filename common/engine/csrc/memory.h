// Memory that grows and never shrinks.
#pragma once

#include <cstdint>
#include <vector>

namespace baton {

template <class V>
auto* at_least(V& memory, int64_t count) {
    if (static_cast<int64_t>(memory.size()) < count) memory.resize(count);
    return memory.data();
}

}  // namespace baton
