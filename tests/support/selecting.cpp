// Compares the edges that RowSampler finds with those of sorted rows, and counts the entries that it gives to the library
// to be sorted.  tests/models/native/test_sample.py compiles and runs it.  Prints the number of rows; aborts on a difference.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

size_t sorted_entries = 0;

namespace std {  // what the sampler calls; the macros below lead there
template <class I, class... F>
void counted_sort(I from, I to, F... f) { sorted_entries += to - from; sort(from, to, f...); }
template <class I, class... F>
void counted_stable_sort(I from, I to, F... f) { sorted_entries += to - from; stable_sort(from, to, f...); }
template <class I, class... F>
void counted_partial_sort(I from, I n, I to, F... f) { sorted_entries += to - from; partial_sort(from, n, to, f...); }
template <class I, class... F>
void counted_nth_element(I from, I n, I to, F... f) { sorted_entries += to - from; nth_element(from, n, to, f...); }
}  // namespace std

#include "threads.hpp"
#define sort counted_sort
#define stable_sort counted_stable_sort
#define partial_sort counted_partial_sort
#define nth_element counted_nth_element
#define private public
#include "sample.hpp"
#undef private
#undef sort
#undef stable_sort
#undef partial_sort
#undef nth_element

std::mt19937 dice(1);
double uniform() { return std::uniform_real_distribution<>()(dice); }
int pick(int n) { return int(dice() % unsigned(n)); }

void demand(bool holds, const char* what, int kind, int words) {
    if (holds) return;
    fprintf(stderr, "%s: kind %d, %d words\n", what, kind, words);
    exit(1);
}

constexpr int KINDS = 10;
std::vector<float> row_of(int kind, int words) {
    std::vector<float> row(words);
    std::normal_distribution<float> normal;
    const float near = 10 * normal(dice);
    for (int i = 0; i < words; ++i) switch (kind) {
        case 0: row[i] = 2 * normal(dice); break;
        case 1: row[i] = near; break;                                          // all equal
        case 2: row[i] = near + pick(2) * 1e-3f; break;                       // two values
        case 3: row[i] = -50.f * i / words; break;                             // all exponents
        case 4: row[i] = pick(5) ? -INFINITY : normal(dice); break;           // weights 0
        case 5: row[i] = 0.69314718f * float(-pick(20)); break;               // about powers of two, many ties
        case 6: row[i] = i ? -80.f - 10 * float(uniform()) : 0.f; break;       // one token, and weights near the least
        case 7: row[i] = normal(dice) * std::pow(10.f, float(pick(38))); break;
        case 8: row[i] = pick(2) ? 0.f : -0.f; break;
        case 9: row[i] = pick(100) ? -1e-40f * pick(9) : 3.4e38f; break;     // the least and the largest numbers
    }
    return row;
}

// The edge of a row that is sorted.
float sorted_edge(const float* weights, int count, double required) {
    std::vector<float> falling;
    std::copy_if(weights, weights + count, std::back_inserter(falling), [](float w) { return w > 0.f; });
    if (falling.empty()) return 0.f;
    std::sort(falling.begin(), falling.end(), std::greater<>());
    size_t i = 0;
    for (double before = falling[0]; i + 1 < falling.size() && before < required; before += falling[i]) ++i;
    return falling[i];
}

void compare(RowSampler& sampler, int kind, int words) {
    std::vector<float> row = row_of(kind, words), falling = row;
    std::sort(falling.begin(), falling.end(), std::greater<>());
    Sample d{};
    d.logits = row.data();
    d.words = words;
    sampler.load_logits(d, false);
    const float most = sampler.largest_logit();
    const int counts[] = {1, 2, 1 + pick(words), words / 64, words / 64 + 1, words / 2, words};
    sorted_entries = 0;
    for (int count : counts) {
        count = std::max(1, std::min(count, words));
        demand(sampler.nth_largest(count) == falling[count - 1], "another number of that rank", kind, words);
    }
    const int scored = 1 + pick(std::min(words, 20));
    sampler.list_candidates(scored);
    std::vector<int> order(words);
    for (int i = 0; i < words; ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return row[a] > row[b]; });
    demand(int(sampler.candidates_.size()) == scored, "other candidates", kind, words);
    for (int i = 0; i < scored; ++i) demand(sampler.candidates_[i].index == order[i], "another candidate", kind, words);
    if (most == -INFINITY) return;
    const float shares[] = {0.f, 1e-30f, 0.1f, 0.5f, float(uniform()), 0.9f, 0.999f, std::nextafter(1.f, 0.f)};
    for (float share : shares)
        for (float scale : {LOG2_E, LOG2_E / 2, 7.f}) {
            sampler.compute_weights(most, scale, pick(2) ? -INFINITY : falling[pick(words)]);
            const double required = share * sampler.total_;
            const float wanted = sorted_edge(sampler.weights_, sampler.padded_vocabulary_, required);
            demand(sampler.least_weight_of(required) == wanted, "another edge", kind, words);
        }
    // 8 selections of logits: of the maxima and of what is left by them, only if they are few, and the candidates.
    demand(sorted_entries <= 8 * 2 * 2048 + 20, "too many entries were sorted", kind, words);
}

int main(int, char** words) {
    int rows = 0;
    auto sampler = std::make_unique<RowSampler>();
    for (int round = atoi(words[1]); round--;)
        for (int kind = 0; kind < KINDS; ++kind)
            for (int words : {1, 3, 64, 65, 257, 1 + pick(3000), 5000, 20'001}) compare(*sampler, kind, words), ++rows;
    for (int kind = 0; kind < KINDS; ++kind) compare(*sampler, kind, 262'144), ++rows;
    printf("%d rows\n", rows);
}
