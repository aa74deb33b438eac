// Samples the next token from one row of logits at a time, without sorting the row.
//
// A token is sampled from all, and accepted if it is allowed by top-p or typical-p; otherwise only tokens better than it
// are kept, and another one is sampled.  This gives the distribution over the allowed tokens, and each trial costs one pass
// over the row.  A row's numbers stay in the cache of the core that samples it, and the result depends on that row alone.
//
// Temperature, top-k, top-p, min-p and typical-p apply in this order and are defined as in transformers; of equal tokens
// at the edge of a cut all stay.
#pragma once

#include <algorithm>
#include <vector>

#include "scratch.hpp"
#include "threads.hpp"
#include "vectors.hpp"

struct Sample {
    const float* logits;               // [V], finite
    const int64_t* changed;            // [K] tokens whose logit is changed; those from V on are ignored
    const float* changes;              // [3, stride] for each: a bias, a repetition penalty, a bias added after it
    const uint32_t *allowed, *guided;  // bit i: token i is allowed; null: all are
    int32_t* tops;                     // [scored], out: the most likely tokens; of equals the lowest first
    float* top_values;                 // [scored], out: their log-probabilities
    double uniform;                    // in [0, 1)
    int32_t words, changed_count, stride;
    int32_t top_k;                     // 0: all
    float temperature;                 // 0: the lowest token with the largest logit
    float top_p, min_p, typical_p;     // 1, 0, 1: all
    int32_t scored;                    // how many tops, by the unchanged logits; -1: the sampled token has no value either
    int32_t word;                      // out: the sampled token; -1 if none is allowed
    float value;                       // out: its log-probability
    int32_t unused;
};

namespace {

constexpr int CHUNK = 64;                  // tokens that share one maximum or sum
constexpr int DIGITS = 2048, SUMS = 8;     // values of a digit of `select`; sums for each
constexpr float LARGEST = 3.4028234664e38f;  // a changed logit is at most this: infinite ones have no difference
constexpr float MIN_TEMPERATURE = 1e-4f;   // the lowest temperature; lower ones are raised to it
constexpr float LOWEST_EXPONENT = -126.f;  // exponents of two below it give the weight 0
constexpr float LOG2_E = 1.44269504f;

// More uniform numbers from the first (SplitMix64: Steele et al. 2014).
class UniformNumbers {
  public:
    explicit UniformNumbers(double uniform) { memcpy(&state_, &uniform, sizeof state_); }
    double next() {
        uint64_t z = state_ += 0x9e3779b97f4a7c15;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
        z = (z ^ z >> 27) * 0x94d049bb133111eb;
        return double((z ^ z >> 31) >> 11) * 0x1p-53;
    }

  private:
    uint64_t state_;
};

class RowSampler {  // samples one row; holds scratch for its logits and weights
  public:
    void sample(Sample& d) {
        d.word = choose_token(d);
        if (d.scored >= 0 && d.word >= 0) score_token(d);
    }

  private:
    struct Candidate { float value; int index; };

    int choose_token(const Sample& d) {
        load_logits(d, d.changed_count || d.allowed || d.guided);
        const float most = largest_logit();
        if (most == -INFINITY) return -1;
        if (d.temperature == 0.f) return index_of(most);
        const float inverse_temperature = LOG2_E / std::max(d.temperature, MIN_TEMPERATURE);
        const bool typical = d.typical_p < 1.f, nucleus = d.top_p < 1.f;
        compute_weights(most, inverse_temperature, d.top_k > 0 && d.top_k < d.words ? nth_largest(d.top_k) : -INFINITY);
        double required = d.top_p * total_;
        if (typical && nucleus) drop_weights_below(least_weight_of(required));
        if (d.min_p > 0.f) drop_weights_below(d.min_p);  // of the largest weight, which is 1
        if (typical) {
            compute_typicality(most, inverse_temperature);
            required = d.typical_p * total_;
        }
        const int index = sample_by_weight(d.uniform);
        if (index < 0 || !typical && !nucleus) return index;
        return sample_until_allowed(index, typical ? buffer_ : weights_, required, UniformNumbers(d.uniform));
    }

    void score_token(Sample& d) {
        load_logits(d, false);
        if (d.scored) {
            list_candidates(d.scored);
        }
        const float most = d.scored ? candidates_[0].value : largest_logit();
        compute_weights(most, LOG2_E, -INFINITY);
        const float sum = most + float(std::log(total_));
        d.value = d.logits[d.word] - sum;
        for (int i = 0; i < d.scored; ++i) {
            d.tops[i] = candidates_[i].index;
            d.top_values[i] = candidates_[i].value - sum;
        }
    }

    // The `count` largest logits, falling; of equal ones the lowest tokens, rising.
    void list_candidates(int count) {
        const float least = nth_largest(count);
        candidates_.clear();
        int room = count;  // for logits equal to the least
        for (int b = 0; b < chunks_; ++b)
            for (int i = b * CHUNK; sums_[b] > least && i < (b + 1) * CHUNK; ++i) room -= logits_[i] > least;
        for (int b = 0; b < chunks_; ++b) {
            if (sums_[b] < least || sums_[b] == least && !room) continue;
            for (int i = b * CHUNK; i < (b + 1) * CHUNK; ++i)
                if (logits_[i] > least || logits_[i] == least && room-- > 0) candidates_.push_back({logits_[i], i});
        }
        std::stable_sort(candidates_.begin(), candidates_.end(),
                         [](const Candidate& a, const Candidate& b) { return a.value > b.value; });
    }

    // Sets logits_ to the row, or to a copy if logits are changed (`otherwise`) or do not fill the last chunks, whose rest
    // is minus infinity.
    void load_logits(const Sample& d, bool otherwise) {
        chunks_ = (d.words + CHUNK - 1) / CHUNK + 3 & ~3;
        padded_vocabulary_ = chunks_ * CHUNK;
        buffer_ = buffer_scratch_.reserve(padded_vocabulary_);
        weights_ = weights_scratch_.reserve(padded_vocabulary_);
        sums_ = sums_scratch_.reserve(chunks_);
        logits_ = d.logits;
        if (otherwise) apply_changes(d);
        else if (padded_vocabulary_ > d.words) memcpy(buffer_, d.logits, size_t(d.words) * sizeof(float));
        if (otherwise || padded_vocabulary_ > d.words) {
            std::fill(buffer_ + d.words, buffer_ + padded_vocabulary_, -INFINITY);
            logits_ = buffer_;
        }
    }

    float largest_logit() const {
        Floats top[4] = {all(-INFINITY), all(-INFINITY), all(-INFINITY), all(-INFINITY)};
        for (int i = 0; i < padded_vocabulary_; i += 4 * LANES)
            UNROLL(4, k, top[k] = largest(top[k], load(logits_ + i + k * LANES)));
        return highest(largest(largest(top[0], top[1]), largest(top[2], top[3])));
    }

    void apply_changes(const Sample& d) {
        const float* from = d.logits;
        if (d.changed_count) {
            memcpy(buffer_, from, size_t(d.words) * sizeof(float));
            apply_penalties(d);
            from = buffer_;
        }
        for (const uint32_t* may : {d.allowed, d.guided}) {
            if (!may) continue;
            int i = 0;
            for (; i + LANES <= d.words; i += LANES)
                store(buffer_ + i, where(may[i / 32] >> i % 32, load(from + i), -INFINITY));
            for (; i < d.words; ++i) buffer_[i] = may[i / 32] >> i % 32 & 1 ? from[i] : -INFINITY;
            from = buffer_;
        }
    }

    void apply_penalties(const Sample& d) {
        const float *add = d.changes, *factor = add + d.stride, *more = factor + d.stride;
        for (int k = 0; k < d.changed_count; ++k) {
            if (d.changed[k] >= d.words) continue;
            float& x = buffer_[d.changed[k]];
            x += add[k];
            if (factor[k] != 1.f) x = x < 0.f ? x * factor[k] : std::min(x / factor[k], LARGEST);
            x = std::min(x + more[k], LARGEST);
        }
    }

    int index_of(float value) const {
        int i = 0;
        while (!any_at_least(load(logits_ + i), all(value))) i += LANES;
        while (logits_[i] != value) ++i;
        return i;
    }

    // Computes the weights of all tokens, f(i) for LANES of them from i on, and their sums.
    template <class F>
    void fill(F f) {
        for (int b = 0; b < chunks_; b += 4) {
            Floats s[4];
            for (int j = 0; j < 4; ++j) {
                s[j] = zero();
                const int from = (b + j) * CHUNK;
                UNROLL(CHUNK / LANES, k, const int i = from + k * LANES; Floats w = f(i); store(weights_ + i, w);
                       s[j] = add(s[j], w));
            }
            store_sums(sums_ + b, s[0], s[1], s[2], s[3]);
        }
        total_ = 0;
        for (int b = 0; b < chunks_; ++b) total_ += sums_[b];
    }
    void compute_weights(float most, float inverse_temperature, float least) {
        fill([&](int i) INLINED {
            Floats x = load(logits_ + i), log = mul(sub(x, all(most)), all(inverse_temperature));
            return if_at_least(if_at_least(binary_power(log), log, all(LOWEST_EXPONENT)), x, all(least));
        });
    }
    void drop_weights_below(float least) {
        fill([&](int i) INLINED { Floats w = load(weights_ + i); return if_at_least(w, w, all(least)); });
    }

    // Minus the distance of each weight's logarithm from the mean of all (typical sampling), to buffer_.
    void compute_typicality(float most, float inverse_temperature) {
        auto log = [&](int i) INLINED {
            return largest(mul(sub(load(logits_ + i), all(most)), all(inverse_temperature)), all(LOWEST_EXPONENT));
        };
        double sum_of_logs = 0;
        for (int i = 0; i < padded_vocabulary_; i += CHUNK) {
            Floats s = zero();
            UNROLL(CHUNK / LANES, k, s = fma(load(weights_ + i + k * LANES), log(i + k * LANES), s));
            sum_of_logs += sum(s);
        }
        const Floats mean = all(float(sum_of_logs / total_));
        for (int i = 0; i < padded_vocabulary_; i += LANES) store(buffer_ + i, sub(zero(), magnitude(sub(log(i), mean))));
    }

    // The token at which the cumulative weight exceeds that share of the total; never one with weight 0.
    int sample_by_weight(double uniform) const {
        double left = uniform * total_;
        int b = 0, last = 0;
        for (; b < chunks_; ++b) {
            if (sums_[b] > 0.f) {
                last = b;
                if (left < sums_[b]) break;
            }
            left -= sums_[b];
        }
        const float* w = weights_ + last * CHUNK;  // past the end only by rounding
        int index = -1;
        for (int i = 0; i < CHUNK; left -= w[i++]) {
            if (w[i] == 0.f) continue;
            index = i;
            if (left < w[i]) break;
        }
        return index < 0 ? -1 : last * CHUNK + index;  // -1: no weight is above 0
    }

    // Samples until the tokens that are better by `keys` have less than the required weight.
    int sample_until_allowed(int index, const float* keys, double required, UniformNumbers numbers) {
        for (;; index = sample_by_weight(numbers.next())) {
            const Floats better = all(std::nextafter(keys[index], INFINITY));
            fill([&](int i) INLINED { return if_at_least(load(weights_ + i), load(keys + i), better); });
            if (total_ < required || total_ == 0) return index;
        }
    }

    // The least of the largest weights that together make up the required weight.
    float least_weight_of(double required) {
        selected_ = selected_scratch_.reserve(padded_vocabulary_ + 1);
        float* end = selected_;
        for (int b = 0; b < chunks_; ++b)
            if (sums_[b] > 0.f) end = std::copy_n(weights_ + b * CHUNK, CHUNK, end);  // after top-k most have no weight
        return select(int(end - selected_), required, [](float weight) { return double(weight); });
    }

    // The `count`th largest logit; the largest one of each chunk is in sums_.
    float nth_largest(int count) {
        selected_ = selected_scratch_.reserve(padded_vocabulary_ + 1);
        for (int b = 0; b < chunks_; ++b) {
            Floats top = load(logits_ + b * CHUNK);
            UNROLL(CHUNK / LANES - 1, k, top = largest(top, load(logits_ + b * CHUNK + (k + 1) * LANES)));
            sums_[b] = highest(top);
        }
        float least = -INFINITY;
        if (count <= chunks_) {  // `count` chunks have a logit at least as large as the `count`th largest maximum
            std::copy_n(sums_, chunks_, selected_);
            least = nth_selected(chunks_, count);
        }
        int found = 0;
        for (int b = 0; b < chunks_; ++b) {
            if (sums_[b] < least) continue;
            for (int i = b * CHUNK; i < (b + 1) * CHUNK; ++i) {
                selected_[found] = logits_[i];
                found += logits_[i] >= least;
            }
        }
        return nth_selected(found, count);
    }

    // The `n`th largest of the first `count` numbers in selected_.
    float nth_selected(int count, int n) {
        if (count > DIGITS) return select(count, n, [](float) { return 1.; });
        std::nth_element(selected_, selected_ + n - 1, selected_ + count, std::greater<>());
        return selected_[n - 1];
    }

    // The largest of the first `count` numbers in selected_ that has the required mass together with all larger ones; if
    // all together have less, the least one with a mass.
    //
    // Its bits are found as three digits, the highest first: the masses of the numbers are added up by their digit, then
    // those with the digit of the result are kept, until all are equal.  So a number is read eight times at most, whatever
    // the numbers are.  The mass of a digit is exact, because its numbers have one exponent.
    template <class F>
    float select(int count, double required, F mass) {
        uint32_t result = 0;
        double above = 0;  // the mass of the numbers with a higher digit
        for (int shift : {21, 10, 0}) {
            int same = 0;
            while (same < count && selected_[same] == selected_[0]) ++same;
            if (same == count) return count ? selected_[0] : 0.f;
            auto digit_of = [shift](float x) INLINED { return int(to_ordered(x) >> shift & (DIGITS - 1)); };
            memset(masses_, 0, sizeof masses_);
            int at = 0;
            for (; at + SUMS <= count; at += SUMS)
                UNROLL(SUMS, k, masses_[digit_of(selected_[at + k])][k] += mass(selected_[at + k]));
            for (; at < count; ++at) masses_[digit_of(selected_[at])][0] += mass(selected_[at]);
            int digit = 0;
            double last = 0;  // the mass of the numbers with `digit`
            for (int d = DIGITS; d-- && !(last > 0 && above + last >= required);) {
                double here = 0;
                for (double sum : masses_[d]) here += sum;
                if (here == 0) continue;
                above += last;
                last = here;
                digit = d;
            }
            result |= uint32_t(digit) << shift;
            int kept = 0;
            for (int i = 0; shift && i < count; ++i) {  // no branch: a wrong guess would cost more than a store
                const float x = selected_[i];
                selected_[kept] = x;
                kept += digit_of(x) == digit;
            }
            count = kept;
        }
        return from_ordered(result);
    }

    // The bits of a float as a number with the same order.
    static INLINE uint32_t to_ordered(float x) {
        uint32_t bits; memcpy(&bits, &x, 4);
        return bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000);
    }
    static INLINE float from_ordered(uint32_t bits) {
        bits ^= bits >> 31 ? 0x80000000 : 0xffffffff;
        float x; memcpy(&x, &bits, 4);
        return x;
    }

    int padded_vocabulary_, chunks_;   // of the vocabulary, with the rest of the last chunk
    const float* logits_;   // the caller's row, or buffer_
    float *buffer_, *weights_, *sums_;
    double total_;
    Scratch<float> buffer_scratch_, weights_scratch_, sums_scratch_, selected_scratch_;
    float* selected_;   // numbers of which one is selected, and room for one more
    double masses_[DIGITS][SUMS];  // by digit, in several sums: an addition to memory waits for the last to the same place
    std::vector<Candidate> candidates_;
};

class Sampler {
  public:
    explicit Sampler(int threads) : team_(threads, false), rows_(threads) {}

    void sample(Sample* samples, int count) {
        if (count < FEW) {
            for (int i = 0; i < count; ++i) rows_[0].sample(samples[i]);
            return;
        }
        std::atomic<int> next{0};
        team_.run([&](int thread) {
            for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) rows_[thread].sample(samples[i]);
        });
    }

  private:
    static constexpr int FEW = 4;  // rows that one thread finishes before the others are awake

    Team team_;
    std::vector<RowSampler> rows_;
};

}  // namespace
