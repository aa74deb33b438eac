// Scratch memory that is reused from step to step.
#pragma once

#include <cstring>
#include <memory>
#include <new>

#ifdef __SANITIZE_ADDRESS__
constexpr bool EXACT = true;  // no spare memory, so that an access past the end is detected
#else
constexpr bool EXACT = false;
#endif

template <class T>
class Scratch {  // memory that grows as needed; new memory is zeros
  public:
    T* reserve(size_t count) {
        if (count > count_) {
            count_ = count + (EXACT ? 0 : count / 4);
            size_t bytes = (count_ * sizeof(T) + 63) / 64 * 64 + (EXACT ? 0 : 64);
            memory_.reset(static_cast<T*>(::operator new(bytes, std::align_val_t(64))));
            memset(static_cast<void*>(memory_.get()), 0, bytes);
        }
        return memory_.get();
    }
    T* get() const { return memory_.get(); }

  private:
    struct Free { void operator()(T* p) const { ::operator delete(p, std::align_val_t(64)); } };
    std::unique_ptr<T, Free> memory_;
    size_t count_ = 0;
};
