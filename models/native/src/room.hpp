// Memory that is used again and again.  Knows nothing of what is kept there.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>

#ifdef __SANITIZE_ADDRESS__
constexpr bool EXACT = true;  // rooms have nothing to spare, so that whoever leaves one is seen
#else
constexpr bool EXACT = false;
#endif

template <class T>
class Room {  // memory that grows and starts as zeros
  public:
    T* of(size_t count) {
        if (count > count_) {
            count_ = count + (EXACT ? 0 : count / 4);
            size_t bytes = (count_ * sizeof(T) + 63) / 64 * 64 + (EXACT ? 0 : 64);
            memory_.reset(static_cast<T*>(std::aligned_alloc(64, bytes)));
            memset(static_cast<void*>(memory_.get()), 0, bytes);
        }
        return memory_.get();
    }
    T* get() const { return memory_.get(); }

  private:
    struct Free { void operator()(T* p) const { std::free(p); } };
    std::unique_ptr<T, Free> memory_;
    size_t count_ = 0;
};
