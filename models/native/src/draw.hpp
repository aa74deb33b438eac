// Which word comes next: one row of logits at a time, without sorting it.
//
// Knows logits and how a word is drawn from them; no network.  The one idea: a word is drawn from all, and kept if it is
// one of those that may come; else those that are better are left alone, and another is drawn.  That is the distribution
// over those that may come, for the price of one look at what is better than the word drawn.  A row's numbers stay in
// the cache of the core that draws from it, and what is drawn depends on that row alone.
//
// Temperature, top-k, top-p, min-p and typical-p apply in this order and mean what they mean in transformers; of equals
// at the edge of a cut all stay.
#pragma once

#include <algorithm>
#include <vector>

#include "room.hpp"
#include "threads.hpp"
#include "vectors.hpp"

struct Draw {
    const float* logits;               // [V], finite
    const int64_t* changed;            // [K] words of which the logit is changed; those past V are not there
    const float* changes;              // [3, stride] what is added to it, by what it is repeated less, what is added then
    const uint32_t *allowed, *guided;  // bit i: word i may come; null: all may
    int32_t* tops;                     // [scored], out: the likeliest words, the lower one first of equals
    float* top_values;                 // [scored], out: their log-probabilities
    double uniform;                    // in [0, 1)
    int32_t words, changed_count, stride;
    int32_t top_k;                     // 0: all
    float temperature;                 // 0: the first of the likeliest
    float top_p, min_p, typical_p;     // 1, 0, 1: all
    int32_t scored;                    // of the logits as they are; -1: not even the word
    int32_t word;                      // out; -1 where none may come
    float value;                       // out: its log-probability
    int32_t unused;
};

namespace {

constexpr int BUNCH = 64;          // words that are looked at as one first
constexpr float COLDEST = 1e-4f;   // temperatures below are taken for this one
constexpr float NOTHING = -126.f;  // two to the power of less is taken for 0
constexpr float LOG2_E = 1.44269504f;

// More uniform numbers from the first (SplitMix64: Steele et al. 2014).
class Chance {
  public:
    explicit Chance(double uniform) { memcpy(&state_, &uniform, sizeof state_); }
    double next() {
        uint64_t z = state_ += 0x9e3779b97f4a7c15;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
        z = (z ^ z >> 27) * 0x94d049bb133111eb;
        return double((z ^ z >> 31) >> 11) * 0x1p-53;
    }

  private:
    uint64_t state_;
};

class Row {  // room for the logits of one row and for their weights
  public:
    void draw(Draw& d) {
        d.word = chosen(d);
        if (d.scored >= 0 && d.word >= 0) score(d);
    }

  private:
    struct Word { float value; int place; };

    int chosen(const Draw& d) {
        find(d, d.changed_count || d.allowed || d.guided);
        const float most = largest_of_all();
        if (most == -INFINITY) return -1;
        if (d.temperature == 0.f) return place_of(most);
        const float heat = LOG2_E / std::max(d.temperature, COLDEST);
        const bool typical = d.typical_p < 1.f, nucleus = d.top_p < 1.f;
        weigh(most, heat, d.top_k > 0 && d.top_k < d.words ? largest_but(d.top_k) : -INFINITY);
        double enough = d.top_p * total_;
        if (typical && nucleus) cut(last_of(enough));
        if (d.min_p > 0.f) cut(d.min_p);  // of the largest weight, which is 1
        if (typical) {
            rate(most, heat);
            enough = d.typical_p * total_;
        }
        const int place = pick(d.uniform);
        return typical || nucleus ? kept(place, typical ? own_ : weights_, enough, Chance(d.uniform)) : place;
    }

    void score(Draw& d) {
        find(d, false);
        if (d.scored) {
            largest_but(d.scored);
            auto before = [](const Word& a, const Word& b) { return a.value != b.value ? a.value > b.value : a.place < b.place; };
            std::partial_sort(some_.begin(), some_.begin() + d.scored, some_.end(), before);
        }
        const float most = d.scored ? some_[0].value : largest_of_all();
        weigh(most, LOG2_E, -INFINITY);
        const float sum = most + float(std::log(total_));
        d.value = d.logits[d.word] - sum;
        for (int i = 0; i < d.scored; ++i) {
            d.tops[i] = some_[i].place;
            d.top_values[i] = some_[i].value - sum;
        }
    }

    // Finds the logits, or makes a copy: where they are to be `otherwise`, as is asked, or do not fill their last bunches,
    // of which minus infinity is the rest.
    void find(const Draw& d, bool otherwise) {
        bunches_ = (d.words + BUNCH - 1) / BUNCH + 3 & ~3;
        words_ = bunches_ * BUNCH;
        own_ = own_room_.of(words_);
        weights_ = weights_room_.of(words_);
        sums_ = sums_room_.of(bunches_);
        logits_ = d.logits;
        if (otherwise) reshape(d);
        else if (words_ > d.words) memcpy(own_, d.logits, size_t(d.words) * sizeof(float));
        if (otherwise || words_ > d.words) {
            std::fill(own_ + d.words, own_ + words_, -INFINITY);
            logits_ = own_;
        }
    }

    float largest_of_all() const {
        Floats top[4] = {all(-INFINITY), all(-INFINITY), all(-INFINITY), all(-INFINITY)};
        for (int i = 0; i < words_; i += 4 * LANES)
            UNROLL(4, k, top[k] = largest(top[k], load(logits_ + i + k * LANES)));
        return highest(largest(largest(top[0], top[1]), largest(top[2], top[3])));
    }

    void reshape(const Draw& d) {
        const float* from = d.logits;
        if (d.changed_count) {
            memcpy(own_, from, size_t(d.words) * sizeof(float));
            change(d);
            from = own_;
        }
        for (const uint32_t* may : {d.allowed, d.guided}) {
            if (!may) continue;
            int i = 0;
            for (; i + LANES <= d.words; i += LANES) store(own_ + i, where(may[i / 32] >> i % 32, load(from + i), -INFINITY));
            for (; i < d.words; ++i) own_[i] = may[i / 32] >> i % 32 & 1 ? from[i] : -INFINITY;
            from = own_;
        }
    }

    void change(const Draw& d) {
        const float *add = d.changes, *factor = add + d.stride, *more = factor + d.stride;
        for (int k = 0; k < d.changed_count; ++k) {
            if (d.changed[k] >= d.words) continue;
            float& x = own_[d.changed[k]];
            x += add[k];
            if (factor[k] != 1.f) x = x < 0.f ? x * factor[k] : x / factor[k];
            x += more[k];
        }
    }

    int place_of(float value) const {
        int i = 0;
        while (!any_at_least(load(logits_ + i), all(value))) i += LANES;
        while (logits_[i] != value) ++i;
        return i;
    }

    // The weights of all words, f(i) of LANES of them from i on, and their sums.
    template <class F>
    void fill(F f) {
        for (int b = 0; b < bunches_; b += 4) {
            Floats s[4];
            for (int j = 0; j < 4; ++j) {
                s[j] = zero();
                const int from = (b + j) * BUNCH;
                UNROLL(BUNCH / LANES, k, const int i = from + k * LANES; Floats w = f(i); store(weights_ + i, w);
                       s[j] = add(s[j], w));
            }
            store_sums(sums_ + b, s[0], s[1], s[2], s[3]);
        }
        total_ = 0;
        for (int b = 0; b < bunches_; ++b) total_ += sums_[b];
    }
    void weigh(float most, float heat, float least) {
        fill([&](int i) INLINED {
            Floats x = load(logits_ + i), log = mul(sub(x, all(most)), all(heat));
            return if_at_least(if_at_least(binary_power(log), log, all(NOTHING)), x, all(least));
        });
    }
    void cut(float least) {
        fill([&](int i) INLINED { Floats w = load(weights_ + i); return if_at_least(w, w, all(least)); });
    }

    // How near the logarithm of each weight is to the mean of them all, the nearest the largest.
    void rate(float most, float heat) {
        auto log = [&](int i) INLINED { return largest(mul(sub(load(logits_ + i), all(most)), all(heat)), all(NOTHING)); };
        double sum_of_logs = 0;
        for (int i = 0; i < words_; i += BUNCH) {
            Floats s = zero();
            UNROLL(BUNCH / LANES, k, s = fma(load(weights_ + i + k * LANES), log(i + k * LANES), s));
            sum_of_logs += sum(s);
        }
        const Floats mean = all(float(sum_of_logs / total_));
        for (int i = 0; i < words_; i += LANES) store(own_ + i, sub(zero(), magnitude(sub(log(i), mean))));
    }

    // The word at which the weights, added up, exceed that share of their sum; never one of no weight.
    int pick(double uniform) const {
        double left = uniform * total_;
        int b = 0, last = 0;
        for (; b < bunches_; ++b) {
            if (sums_[b] > 0.f) {
                last = b;
                if (left < sums_[b]) break;
            }
            left -= sums_[b];
        }
        const float* w = weights_ + last * BUNCH;  // past the end only by rounding
        int place = -1;
        for (int i = 0; i < BUNCH; left -= w[i++]) {
            if (w[i] == 0.f) continue;
            place = i;
            if (left < w[i]) break;
        }
        return last * BUNCH + place;
    }

    // The first of the words drawn of which those that are better by `keys` are not yet `enough`.
    int kept(int place, const float* keys, double enough, Chance chance) {
        for (;; place = pick(chance.next())) {
            const Floats better = all(std::nextafter(keys[place], INFINITY));
            fill([&](int i) INLINED { return if_at_least(load(weights_ + i), load(keys + i), better); });
            if (total_ < enough || total_ == 0) return place;
        }
    }

    // The least of the largest weights that make up `enough`.
    float last_of(double enough) {
        std::vector<float> falling;
        std::copy_if(weights_, weights_ + words_, std::back_inserter(falling), [](float w) { return w > 0.f; });
        std::sort(falling.begin(), falling.end(), std::greater<>());
        size_t i = 0;
        for (double before = falling[0]; i + 1 < falling.size() && before < enough; before += falling[i]) ++i;
        return falling[i];
    }

    // The `count`th of the largest logits; all that are at least as large are among `some_`.
    float largest_but(int count) {
        for (int b = 0; b < bunches_; ++b) {
            Floats top = load(logits_ + b * BUNCH);
            UNROLL(BUNCH / LANES - 1, k, top = largest(top, load(logits_ + b * BUNCH + (k + 1) * LANES)));
            sums_[b] = highest(top);
        }
        float least = -INFINITY;
        if (count <= bunches_) {  // as many bunches have one at least as large as the `count`th of their largest
            tops_.assign(sums_, sums_ + bunches_);
            std::nth_element(tops_.begin(), tops_.begin() + count - 1, tops_.end(), std::greater<>());
            least = tops_[count - 1];
        }
        some_.clear();
        for (int b = 0; b < bunches_; ++b) {
            if (sums_[b] < least) continue;
            for (int i = b * BUNCH; i < (b + 1) * BUNCH; ++i)
                if (logits_[i] >= least) some_.push_back({logits_[i], i});
        }
        auto before = [](const Word& a, const Word& b) { return a.value > b.value; };
        std::nth_element(some_.begin(), some_.begin() + count - 1, some_.end(), before);
        return some_[count - 1].value;
    }

    int words_, bunches_;   // of them, with the rest of the last
    const float* logits_;   // somebody else's, or our own
    float *own_, *weights_, *sums_;
    double total_;
    Room<float> own_room_, weights_room_, sums_room_;
    std::vector<Word> some_;
    std::vector<float> tops_;
};

class Drawer {
  public:
    explicit Drawer(int threads) : team_(threads, false), rows_(threads) {}

    void draw(Draw* draws, int count) {
        if (count < FEW) {
            for (int i = 0; i < count; ++i) rows_[0].draw(draws[i]);
            return;
        }
        std::atomic<int> next{0};
        team_.run([&](int thread) {
            for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) rows_[thread].draw(draws[i]);
        });
    }

  private:
    static constexpr int FEW = 4;  // rows that are done sooner than the others are awake

    Team team_;
    std::vector<Row> rows_;
};

}  // namespace
