// Mixtures of experts: which experts a row uses, and the rows of each expert (models/network/experts.py).
//
// The numbers of experts are computed here and nowhere read from outside.  Each is below the count, whatever the scores are.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "gemm.hpp"
#include "rows.hpp"

// How experts are chosen, the same in all layers (models/network/model_config.py, ExpertConfig).
struct Routing {
    int32_t count;         // E; 0: no layer has experts
    int32_t chosen;        // experts of a row
    int32_t groups;        // of equal size, of which the best `chosen_groups` remain; 0: none
    int32_t chosen_groups;
    int32_t logistic;      // scores are logistic functions, otherwise a softmax
    int32_t normalised;    // weights are divided by their sum plus `normalised_eps`
    int32_t shared;        // there is an expert that all rows use
    int32_t shared_gate;   // its output is multiplied by a gate
    float normalised_eps;
    float scale;           // of the weights
    float clamp;           // the limit of inner features; 0: none
    int32_t unused;
};

struct Expert {
    Linear up, down;  // as in Layer
};

struct Mixture {
    Linear router;             // FLOAT32; its outputs are the scores [E], then the shared expert's gate if it has one
    const float* choice_bias;  // [E], added to scores for the choice only; or null
    const float* output_scales;  // [E], by which weights are multiplied, or null
    // [W], by which the inputs of the chosen experts and of the shared one are multiplied, or null; and the norms of the sum
    // of the former and of the output of the latter, without weights: none.
    const float *chosen_input, *shared_input;
    Norm chosen_norm, shared_norm;
    const Expert* experts;     // [E], then the shared expert if there is one

    const float* input_of(bool shared) const { return shared ? shared_input : chosen_input; }
    bool norms_parts() const { return chosen_norm.weight; }
};

struct Choice {
    int32_t expert;
    float weight;
};

struct RoutingScratch {
    std::vector<float> scores, compared, ranks;
    std::vector<uint8_t> taken;
    std::vector<int32_t> best;
};

// Whether score `a` is chosen before score `b`.  NaN is chosen before all numbers, as in torch.topk.
inline bool is_above(float a, float b) { return a > b || (a != a && b == b); }

// The numbers of the `wanted` largest of `count` scores, the largest first, of equal ones the lowest number first.
inline void take_largest(const float* scores, int count, int wanted, std::vector<uint8_t>& taken, std::vector<int32_t>& out) {
    taken.assign(count, 0);
    out.clear();
    for (int i = 0; i < wanted; ++i) {
        int best = -1;
        for (int n = 0; n < count; ++n)
            if (!taken[n] && (best < 0 || is_above(scores[n], scores[best]))) best = n;
        taken[best] = 1;
        out.push_back(best);
    }
}

inline float logistic(float x) { return 1.f / (1.f + std::exp(-x)); }

// logits [E] to scores [E].
inline void score_experts(const Routing& r, const float* logits, float* scores) {
    if (r.logistic) {
        for (int n = 0; n < r.count; ++n) scores[n] = logistic(logits[n]);
        return;
    }
    float most = logits[0], sum = 0.f;
    for (int n = 1; n < r.count; ++n)
        if (is_above(logits[n], most)) most = logits[n];
    for (int n = 0; n < r.count; ++n) sum += scores[n] = std::exp(logits[n] - most);
    for (int n = 0; n < r.count; ++n) scores[n] /= sum;
}

// Scores of all but the best groups become -infinity.  A group is as good as its best expert; with a bias for the choice,
// as its best two.
inline void hide_groups(const Routing& r, bool two, RoutingScratch& scratch) {
    const int size = r.count / r.groups;
    scratch.ranks.resize(r.groups);
    for (int g = 0; g < r.groups; ++g) {
        const float* group = scratch.compared.data() + g * size;
        take_largest(group, size, two ? 2 : 1, scratch.taken, scratch.best);
        scratch.ranks[g] = group[scratch.best[0]] + (two ? group[scratch.best[1]] : 0.f);
    }
    take_largest(scratch.ranks.data(), r.groups, r.chosen_groups, scratch.taken, scratch.best);
    for (int n = 0; n < r.count; ++n)
        if (!scratch.taken[n / size]) scratch.compared[n] = -INFINITY;
}

// The choices of one row from the router's outputs: [chosen], then the shared expert if there is one.
inline void choose_experts(const Routing& r, const Mixture& mixture, const float* logits, RoutingScratch& scratch,
                           Choice* out) {
    const float *choice_bias = mixture.choice_bias, *scales = mixture.output_scales;
    scratch.scores.resize(r.count);
    float* scores = scratch.scores.data();
    score_experts(r, logits, scores);
    scratch.compared = scratch.scores;
    if (choice_bias) for (int n = 0; n < r.count; ++n) scratch.compared[n] += choice_bias[n];
    if (r.groups) hide_groups(r, choice_bias != nullptr, scratch);
    take_largest(scratch.compared.data(), r.count, r.chosen, scratch.taken, scratch.best);
    float sum = 0.f;
    for (int n : scratch.best) sum += scores[n];
    for (int i = 0; i < r.chosen; ++i) {
        const int n = scratch.best[i];
        out[i] = {n, (r.normalised ? scores[n] / (sum + r.normalised_eps) : scores[n]) * (scales ? scales[n] : 1.f) * r.scale};
    }
    if (r.shared) out[r.chosen] = {r.count, r.shared_gate ? logistic(logits[r.count]) : 1.f};
}

// A row of an expert, and the weight of the expert's output.
struct ExpertRow {
    int32_t row;
    float weight;
};

// The rows of one expert: `count` from `first` on in the list of all.
struct ExpertRows {
    int32_t expert, first, count;
    int32_t inputs;  // of the expert's second product
    size_t offset;   // of its first row's inner features among those of all experts
};

// Rows by expert, in the order of the experts' numbers, then of rows.
struct RowsByExpert {
    std::vector<ExpertRow> rows;
    std::vector<ExpertRows> experts;  // those with rows
    std::vector<int32_t> next;

    // `choices` [rows, each]; `count` of experts, the shared one included.
    void sort(const Choice* choices, int row_count, int each, const Expert* all, int count) {
        next.assign(count + 1, 0);
        for (int i = 0; i < row_count * each; ++i) ++next[choices[i].expert + 1];
        experts.clear();
        size_t offset = 0;
        for (int n = 0; n < count; ++n) {
            const int32_t rows_of = next[n + 1], inputs = all[n].down.inputs;
            if (rows_of) experts.push_back({n, next[n], rows_of, inputs, offset});
            offset += size_t(rows_of) * inputs;
            next[n + 1] += next[n];
        }
        rows.resize(size_t(row_count) * each);
        for (int row = 0; row < row_count; ++row)
            for (int i = 0; i < each; ++i) {
                const Choice& choice = choices[row * each + i];
                rows[next[choice.expert]++] = {row, choice.weight};
            }
    }
};

// A part of the experts' first products: rows [first, first + count) of all, blocks [from, to) of the outputs.
struct ExpertPiece {
    int32_t expert, first, count, from, to;  // expert: its place in RowsByExpert::experts
};
