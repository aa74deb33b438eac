// One step of a transformer, compiled: token ids in, logits or states out.
//
// Knows no requests and no tensors, only a Plan (what the network is made of; plan.py) and Rows (what is to be computed;
// models/executors/contract.py).  The one idea: everything a row goes through depends on that row and on the keys and values its
// sequence has, so how rows are shared among threads is free.  Few rows are computed together, each thread having its
// share of every product's outputs; many rows are cut into panels, and a panel goes through a layer on one thread while
// its numbers stay in that core's cache.
#include <utility>

#include "attention.hpp"
#include "draw.hpp"
#include "gemm.hpp"
#include "pack.hpp"
#include "room.hpp"
#include "rows.hpp"
#include "threads.hpp"

enum Order : int32_t { PRE = 0, POST = 1, SANDWICH = 2 };
// What of Rows is out of range: library.py has the words.
enum class Wrong : int { NOTHING = 0, COUNTS, STARTS, TOKENS, POSITIONS, SEGMENTS, BLOCKS, WANTED, ADAPTERS, CACHE };
enum Product { QKV = 0, OUTPUT = 1, UP = 2, DOWN = 3, PRODUCTS = 4 };

struct Layer {
    Norm attention_norm, mlp_norm, attention_post_norm, mlp_post_norm;
    const float *query_norm, *key_norm;  // [D], or null
    const float* frequencies;            // [D / 2], or null: not rotary
    int64_t window;                      // tokens; 0: sees all
    Linear qkv, output, up, down;        // up: gate and up side by side in each block where the MLP is gated
};

struct Plan {
    int32_t width, depth, heads, kv_heads, head_width, mlp_width;
    int32_t causal, order, norm, activation, gated, generates;
    int32_t block_count;     // of the cache; 0: none, sequences come whole
    int32_t narrow;          // keys and values as codes, the table of token embeddings as bf16
    int32_t position_offset;
    int32_t words;           // V
    int32_t position_count;  // P less the offset; 0: positions are not looked up
    int32_t segment_count;   // S
    float eps, score_scale, embedding_scale, unused;
    const void* tokens;      // [V, W]; null: the rows of `head`
    const float* positions;  // [P, W], or null
    const float* segments;   // [S, W], or null
    Norm embedding_norm, final_norm;
    Linear head;             // generates
    const Layer* layers;     // [depth]
};

struct Rows {
    int32_t count, sequences, wanted_count;
    int32_t rank;                                  // the largest of what adapters add
    const int32_t *tokens, *positions, *segments;  // [T]; segments may be null: all 0
    const int32_t* starts;                         // [N + 1]
    const int32_t *tables, *table_starts;          // blocks of sequence n: tables[table_starts[n] .. table_starts[n + 1])
    const int32_t* wanted;                         // [M], ascending
    const LowRank* const* adapters;                // [N] what is added to a sequence's products, PRODUCTS a layer, or
                                                   // null; null: none has any
    float* states;                                 // [depth][T][width] what each layer makes of each row, or null: not
                                                   // written; the last layer's only of the rows that are wanted
};

namespace {

constexpr int PANEL = 128;   // rows
constexpr int KINDS = 2;     // of rotations: a layer has one of at most two lists of frequencies
constexpr int GRAINS = 6;    // of a product for each thread
constexpr int STREAMED = 8;  // rows up to which memory is waited for, which is read fastest from end to end: one grain
constexpr int CLAIMS = 4;    // products whose counters may be in use, or be made ready, at once
constexpr int RUN = 16;      // blocks that lie side by side in a layer: all layers of a run before the next run, so
                             // that a cache takes memory as it is used
constexpr int FEW = 4;       // rows that every thread prepares for itself, rather than wait for the others

constexpr int padded(int n, int to = PADDING) { return (n + to - 1) / to * to; }

struct Own {  // of one thread
    Room<float> floats, scales, offsets, row, hidden, sandwich, scores, mixed, low, queries, query_scales;
    Room<int8_t> codes;
    Room<int16_t> query_codes;
    Room<const void*> blocks;
    int product = 0;  // how many were made together in this step
};

struct AttentionTile {
    int sequence, row, count;
};

std::pair<int, int> part(int n, int i, int of) { return {int(int64_t(n) * i / of), int(int64_t(n) * (i + 1) / of)}; }

class Model {
  public:
    Model(const Plan& plan, int threads) : plan_(plan), team_(threads), own_(threads), counters_(2 * plan.depth + 2) {
        const Plan& p = plan_;
        width_ = padded(p.width);
        attended_ = padded(p.heads * p.head_width);
        projected_ = padded((p.heads + 2 * p.kv_heads) * p.head_width);
        hidden_ = padded(p.mlp_width);
        head_ = padded(p.head_width, FEATURES);
        group_ = p.heads / p.kv_heads;
        splits_ = (group_ + MOST_QUERIES - 1) / MOST_QUERIES;
        while (group_ % splits_) ++splits_;
        most_inputs_ = std::max({width_, attended_, hidden_});
        key_bytes_ = p.narrow ? key_bytes<Codes>(head_) : key_bytes<float>(head_);
        value_bytes_ = p.narrow ? value_bytes<Codes>(head_) : value_bytes<float>(head_);
        for (int l = 0; l < p.depth; ++l) {
            const float* f = p.layers[l].frequencies;
            frequencies_[l && f != frequencies_[0]] = f;
        }
        for (int i = 0; i < threads; ++i) grow(own_[i]);
    }

    void give_cache(uint8_t* keys, uint8_t* values) { keys_ = keys; values_ = values; }
    size_t cache_bytes(bool values) const {
        const size_t blocks = plan_.block_count ? size_t(plan_.depth) * padded(plan_.block_count, RUN) : 0;
        return blocks * plan_.kv_heads * (values ? value_bytes_ : key_bytes_);
    }

    // Every number of `rows` against the size of what it indexes; lengths of arrays cannot be checked here.
    Wrong wrong(const Rows& rows, int out_stride) const {
        const Plan& p = plan_;
        const int width = p.generates ? p.head.outputs : p.width;
        if (rows.count < 1 || rows.sequences < 1 || rows.rank < 0 || out_stride < width) return Wrong::COUNTS;
        if (rows.wanted_count < 0 || rows.wanted_count > rows.count) return Wrong::COUNTS;
        if (p.block_count && !(keys_ && values_)) return Wrong::CACHE;
        if (rows.starts[0] != 0) return Wrong::STARTS;
        for (int n = 0; n < rows.sequences; ++n)
            if (rows.starts[n + 1] <= rows.starts[n] || rows.starts[n + 1] > rows.count) return Wrong::STARTS;
        if (rows.starts[rows.sequences] != rows.count) return Wrong::STARTS;
        for (int row = 0; row < rows.count; ++row) {
            if (!below(rows.tokens[row], p.words)) return Wrong::TOKENS;
            if (rows.positions[row] < 0 || (p.positions && rows.positions[row] >= p.position_count)) return Wrong::POSITIONS;
            if (p.segments && !below(rows.segments ? rows.segments[row] : 0, p.segment_count)) return Wrong::SEGMENTS;
        }
        for (int i = 0; i < rows.wanted_count; ++i)
            if (!below(rows.wanted[i], rows.count) || (i && rows.wanted[i] <= rows.wanted[i - 1])) return Wrong::WANTED;
        if (p.block_count && rows.table_starts[0] != 0) return Wrong::BLOCKS;
        for (int n = 0; n < rows.sequences; ++n) {
            const int start = rows.starts[n], end = rows.starts[n + 1];
            for (int row = start + 1; row < end; ++row)  // consecutive; none is negative, so a difference is a number
                if (rows.positions[row] - rows.positions[row - 1] != 1) return Wrong::POSITIONS;
            if (!p.block_count) {
                if (rows.positions[start] != 0) return Wrong::POSITIONS;
                continue;
            }
            const int first = rows.table_starts[n], last = rows.table_starts[n + 1];
            if (last < first || rows.positions[end - 1] / BLOCK >= last - first) return Wrong::BLOCKS;
            for (int i = first; i < last; ++i)
                if (!below(rows.tables[i], p.block_count)) return Wrong::BLOCKS;
        }
        for (int n = 0; rows.adapters && n < rows.sequences; ++n) {
            const LowRank* low = rows.adapters[n];
            if (!low || (n && low == rows.adapters[n - 1])) continue;
            for (int i = 0; i < p.depth * PRODUCTS; ++i)
                if (low[i].rank < 0 || low[i].rank > rows.rank) return Wrong::ADAPTERS;
        }
        return Wrong::NOTHING;
    }

    void step(const Rows& rows, float* out, int out_stride, uint8_t* spoiled, int32_t* likeliest) {
        rows_ = rows; out_ = out; out_stride_ = out_stride; spoiled_ = spoiled; likeliest_ = likeliest;
        const size_t t = size_t(rows.count);
        x_ = x_room_.of(t * width_);
        qkv_ = qkv_room_.of(t * projected_);
        attn_ = attn_room_.of(t * attended_);
        last_x_ = last_x_room_.of(size_t(rows.wanted_count) * width_);
        last_attn_ = last_attn_room_.of(size_t(rows.wanted_count) * attended_);
        turns_ = turns_room_.of(2 * t * KINDS * (plan_.head_width / 2));
        memset(spoiled, 0, t);
        team_.muster();
        lay_out();
        for (auto& counter : counters_) counter.n.store(0, std::memory_order_relaxed);
        for (auto& claims : claims_) claims.n.store(team_.size(), std::memory_order_relaxed);
        for (auto& own : own_) { own.product = 0; own.low.of(size_t(PANEL) * rows.rank); }
        team_.run([this](int thread) { compute(thread); });
    }

  private:
    static bool below(int32_t number, int32_t count) { return number >= 0 && number < count; }

    struct alignas(64) Counter { std::atomic<int> n{0}; };

    void grow(Own& own) {
        const size_t inputs = size_t(PANEL) * most_inputs_;
        own.floats.of(inputs); own.codes.of(inputs);
        own.scales.of(inputs / SPAN); own.offsets.of(inputs / GROUP);
        own.row.of(most_inputs_);
        own.hidden.of(size_t(PANEL) * hidden_);
        own.sandwich.of(size_t(PANEL) * width_);
        own.scores.of(size_t(MOST_QUERIES) * PART);
        own.mixed.of(size_t(2 * MOST_QUERIES) * head_);
        own.queries.of(size_t(MOST_QUERIES) * head_);
        own.query_codes.of(size_t(MOST_QUERIES) * head_);
        own.query_scales.of(size_t(MOST_QUERIES) * head_ / FEATURES);
    }

    // How rows share: which tiles attention has, and where sequences lie that have no cache.
    void lay_out() {
        const int heads = group_ / splits_, most = std::max(1, MOST_QUERIES / heads);
        tiles_.clear();
        longest_ = 0;
        for (int n = 0; n < rows_.sequences; ++n) {
            const int start = rows_.starts[n], end = rows_.starts[n + 1];
            longest_ = std::max(longest_, rows_.positions[end - 1] + 1);
            for (int row = start; row < end; row += most) tiles_.push_back({n, row, std::min(most, end - row)});
        }
        if (!plan_.block_count) {
            own_tables_.clear(); own_starts_.assign(1, 0);
            for (int n = 0, next = 0; n < rows_.sequences; ++n) {
                const int blocks = (rows_.starts[n + 1] - rows_.starts[n] + BLOCK - 1) / BLOCK;
                for (int b = 0; b < blocks; ++b) own_tables_.push_back(next++);
                own_starts_.push_back(next);
            }
            rows_.tables = own_tables_.data();
            rows_.table_starts = own_starts_.data();
            keys_ = key_room_.of(own_tables_.size() * plan_.kv_heads * key_bytes_);
            values_ = value_room_.of(own_tables_.size() * plan_.kv_heads * value_bytes_);
        }
        sequence_of_.resize(rows_.count);
        for (int n = 0; n < rows_.sequences; ++n)
            std::fill(sequence_of_.begin() + rows_.starts[n], sequence_of_.begin() + rows_.starts[n + 1], n);
        if (rows_.adapters) {
            who_.resize(rows_.count);
            last_who_.resize(rows_.wanted_count);
            for (int row = 0; row < rows_.count; ++row) who_[row] = rows_.adapters[sequence_of_[row]];
            for (int i = 0; i < rows_.wanted_count; ++i) last_who_[i] = who_[rows_.wanted[i]];
        }
        const int items = int(tiles_.size()) * plan_.kv_heads * splits_;
        parts_ = (longest_ + PART - 1) / PART;
        apart_ = parts_ > 1 && items < 4 * team_.size();
        if (apart_) {
            partial_ = partial_room_.of(size_t(items) * parts_ * MOST_QUERIES * head_);
            outcomes_.resize(size_t(items) * parts_ * MOST_QUERIES);
        }
    }

    // Who computes, and which share of it: all threads the same rows, or this one alone.
    struct Crew {
        Model& model;
        int thread;
        bool together;
        void meet() const { if (together) model.team_.wait(); }
        std::pair<int, int> share(int n) const {
            return together ? part(n, thread, model.team_.size()) : std::pair(0, n);
        }
    };

    template <class F>
    void each_panel(int thread, int count, Counter& next, F&& f) {
        if (count <= PANEL || team_.size() == 1) {
            for (int a = 0; a < count; a += PANEL) f(Crew{*this, thread, true}, a, std::min(count, a + PANEL));
            return;
        }
        const int size = std::min(PANEL, (count + team_.size() - 1) / team_.size());
        for (int a; (a = next.n.fetch_add(1, std::memory_order_relaxed) * size) < count;)
            f(Crew{*this, thread, false}, a, std::min(count, a + size));
    }

    void compute(int thread) {
        const auto [a, b] = part(rows_.count, thread, team_.size());
        for (int row = a; row < b; ++row) embed(row);
        team_.wait();
        for (int l = 0; l < plan_.depth; ++l) {
            each_panel(thread, rows_.count, counters_[2 * l], [&](const Crew& crew, int a, int b) {
                if (l) {
                    close(crew, l - 1, x_, attn_, who_, a, b);
                    if (rows_.states) copy_states(crew, l - 1, x_, nullptr, a, b);
                }
                open(crew, l, a, b);
            });
            team_.wait();
            if (plan_.narrow) attend<Codes>(thread, l);
            else attend<float>(thread, l);
            team_.wait();
        }
        narrow(thread);
        each_panel(thread, rows_.wanted_count, counters_[2 * plan_.depth], [&](const Crew& crew, int a, int b) {
            close(crew, plan_.depth - 1, last_x_, last_attn_, last_who_, a, b);
            if (rows_.states) copy_states(crew, plan_.depth - 1, last_x_, rows_.wanted, a, b);
        });
        team_.wait();
        answer(thread);
    }

    const float* turns(int row, int kind) const {
        return turns_ + (size_t(row) * KINDS + kind) * 2 * (plan_.head_width / 2);
    }
    int kind_of(const Layer& layer) const { return layer.frequencies == frequencies_[0] ? 0 : 1; }

    void embed(int row) {
        const Plan& p = plan_;
        float* x = x_ + size_t(row) * width_;
        const int position = rows_.positions[row];
        if (!p.tokens) weights_of(p.head, rows_.tokens[row], x);
        else {
            const size_t token = size_t(rows_.tokens[row]) * p.width;
            for (int i = 0; i < p.width; ++i)
                x[i] = p.narrow ? widen(((const bf16*)p.tokens)[token + i]) : ((const float*)p.tokens)[token + i];
        }
        for (int i = 0; i < p.width; ++i) x[i] *= p.embedding_scale;
        std::fill(x + p.width, x + width_, 0.f);  // a row that was no number has spoiled its padding
        if (p.segments) {
            const float* segment = p.segments + size_t(rows_.segments ? rows_.segments[row] : 0) * p.width;
            for (int i = 0; i < p.width; ++i) x[i] += segment[i];
        }
        if (p.positions) {
            const float* place = p.positions + size_t(position + p.position_offset) * p.width;
            for (int i = 0; i < p.width; ++i) x[i] += place[i];
        }
        if (p.embedding_norm.weight) norm(p.embedding_norm, x, x);
        const int half = p.head_width / 2;
        for (int kind = 0; kind < KINDS; ++kind) {
            const float* f = frequencies_[kind];
            if (!f) continue;
            float* out = const_cast<float*>(turns(row, kind));
            for (int d = 0; d < half; ++d) {
                const float angle = float(position) * f[d];
                out[d] = std::cos(angle);
                out[half + d] = std::sin(angle);
            }
        }
    }

    void norm(const Norm& norm, const float* x, float* out) const {
        if (!norm.weight) { if (out != x) memcpy(out, x, size_t(width_) * sizeof(float)); return; }
        normalise(NormKind(plan_.norm), norm, plan_.eps, x, plan_.width, width_, out);
    }

    Operand operand(int thread, int inputs) {
        Own& own = own_[thread];
        return {own.floats.get(), own.codes.get(), own.scales.get(), own.offsets.get(), inputs};
    }

    using Who = std::vector<const LowRank*>;
    struct Added {  // to a product
        const LowRank* const* who;  // of its rows; null: nothing
        int which;
    };
    Added added_to(int layer, Product product, const Who& who, int row) const {
        return {rows_.adapters ? who.data() + row : nullptr, layer * PRODUCTS + product};
    }

    // Rows of a product: `values(r)` are row r's floats; every thread has them all when this returns.
    template <class F>
    Operand prepared(const Crew& crew, const Linear& l, const Added& added, int count, bool repeatable, F&& values) {
        const bool own = !crew.together || (repeatable && count <= FEW);
        const int whose = own ? crew.thread : 0;
        Operand x = operand(whose, l.inputs);
        x.low = own_[whose].low.get(); x.stride = rows_.rank; x.who = added.who; x.which = added.which;
        const auto [a, b] = own ? std::pair(0, count) : crew.share(count);
        const float* rows[PANEL];
        for (int r = a; r < b; ++r) {
            rows[r] = values(r);
            prepare(x, l.format, r, rows[r]);
            if (x.who && rows[r] == own_[crew.thread].row.get()) {  // where the next one will be
                if (l.format != FLOAT32) prepare(x, FLOAT32, r, rows[r]);
                rows[r] = x.floats + size_t(r) * x.inputs;
            }
        }
        if (x.who) lower(x, rows, a, b, x.which + 1 < PRODUCTS * plan_.depth);
        if (!own) crew.meet();
        return x;
    }

    // Threads take a few blocks of the outputs at a time, since one core may be faster than another: the first ones by
    // their number, then whatever is next.
    void product(const Crew& crew, const Linear& l, const Operand& x, int count, const Target& to,
                 const Linear* after = nullptr) {
        const int blocks = l.outputs / COLUMNS;
        if (!crew.together || team_.size() == 1) {
            gemm(l, x, count, 0, blocks, to, after ? after->weights : nullptr);
            return;
        }
        Own& own = own_[crew.thread];
        Counter& next = claims_[own.product % CLAIMS];
        if (crew.thread == 0) claims_[(own.product + 2) % CLAIMS].n.store(team_.size(), std::memory_order_relaxed);
        ++own.product;
        const int some = grain(l);
        for (int a = crew.thread * some; a < blocks;) {
            const int b = next.n.fetch_add(1, std::memory_order_relaxed) * some;
            const uint8_t* ahead = nullptr;
            if (b < blocks) ahead = l.weights + b * block_bytes(l);
            else if (after) ahead = after->weights + crew.thread * grain(*after) * block_bytes(*after);
            gemm(l, x, count, a, std::min(a + some, blocks), to, ahead);
            a = b;
        }
        crew.meet();
    }

    int grain(const Linear& l) const {
        return std::max(1, l.outputs / COLUMNS / ((rows_.count <= STREAMED ? 1 : GRAINS) * team_.size()));
    }

    // A layer up to where rows need each other: queries, keys and values of rows [a, b).
    void open(const Crew& crew, int l, int a, int b) {
        const Layer& layer = plan_.layers[l];
        float* row = own_[crew.thread].row.get();
        const Operand x = prepared(crew, layer.qkv, added_to(l, QKV, who_, a), b - a, true, [&](int r) {
            const float* values = x_ + size_t(a + r) * width_;
            if (plan_.order == POST || !layer.attention_norm.weight) return values;
            norm(layer.attention_norm, values, row);
            return (const float*)row;
        });
        product(crew, layer.qkv, x, b - a, {qkv_ + size_t(a) * projected_, projected_, STORE, 0}, &layer.output);
        const auto [from, to] = crew.share(b - a);
        for (int r = from; r < to; ++r) {
            if (plan_.narrow) place<Codes>(l, a + r);
            else place<float>(l, a + r);
        }
    }

    // And from there to its end.
    void close(const Crew& crew, int l, float* x, const float* attn, const Who& who, int a, int b) {
        const Layer& layer = plan_.layers[l];
        const int count = b - a;
        Own& own = own_[crew.thread];
        float* row = own.row.get();
        float* rows = x + size_t(a) * width_;
        auto at = [&](int r) { return rows + size_t(r) * width_; };
        Operand in = prepared(crew, layer.output, added_to(l, OUTPUT, who, a), count, true,
                              [&](int r) { return attn + size_t(a + r) * attended_; });
        added(crew, layer.output, in, count, rows, layer.attention_norm, layer.attention_post_norm, &layer.up);
        in = prepared(crew, layer.up, added_to(l, UP, who, a), count, true, [&](int r) {
            if (plan_.order == POST) return (const float*)at(r);
            norm(layer.mlp_norm, at(r), row);
            return (const float*)row;
        });
        float* hidden = own_[crew.together ? 0 : crew.thread].hidden.get();
        product(crew, layer.up, in, count, {hidden, hidden_, plan_.gated ? GATE : ACTIVATE, plan_.activation}, &layer.down);
        in = prepared(crew, layer.down, added_to(l, DOWN, who, a), count, true,
                      [&](int r) { return hidden + size_t(r) * hidden_; });
        added(crew, layer.down, in, count, rows, layer.mlp_norm, layer.mlp_post_norm, nullptr);
    }

    // Rows [a, b) of `x`, which a layer has been closed on, to `states`; `which` are their numbers, null: their own.
    void copy_states(const Crew& crew, int l, const float* x, const int32_t* which, int a, int b) {
        const size_t width = size_t(plan_.width);
        const auto [from, to] = crew.share(b - a);
        for (int i = a + from; i < a + to; ++i) {
            const size_t row = size_t(l) * rows_.count + (which ? which[i] : i);
            memcpy(rows_.states + row * width, x + size_t(i) * width_, width * sizeof(float));
        }
    }

    // rows += product, with the norms that the order of the layer wants on it.
    void added(const Crew& crew, const Linear& l, const Operand& in, int count, float* rows, const Norm& after_sum,
               const Norm& before_sum, const Linear* after) {
        float* sandwich = own_[crew.together ? 0 : crew.thread].sandwich.get();
        const bool apart = plan_.order == SANDWICH;
        product(crew, l, in, count, {apart ? sandwich : rows, width_, apart ? STORE : ADD, 0}, after);
        if (plan_.order == PRE) return;
        const auto [from, to] = crew.share(count);
        for (int r = from; r < to; ++r) {
            float* x = rows + size_t(r) * width_;
            if (!apart) { norm(after_sum, x, x); continue; }
            float* y = sandwich + size_t(r) * width_;
            norm(before_sum, y, y);
            for (int i = 0; i < width_; i += LANES) store(x + i, add(load(x + i), load(y + i)));
        }
        crew.meet();
    }

    // Which of all heads' shares of blocks, in the order in which they lie.
    size_t place_of(int layer, int block, int head) const {
        const size_t b = size_t(block), at = plan_.block_count ? (b / RUN * plan_.depth + layer) * RUN + b % RUN : b;
        return at * plan_.kv_heads + head;
    }
    template <class T>
    T* keys_at(size_t place) const { return reinterpret_cast<T*>(keys_ + place * key_bytes_); }
    template <class T>
    T* values_at(size_t place) const { return reinterpret_cast<T*>(values_ + place * value_bytes_); }

    // A row's queries and keys normed and turned; keys and values to where attention reads them.
    template <class T>
    void place(int l, int row) {
        const Plan& p = plan_;
        const Layer& layer = p.layers[l];
        const int d = p.head_width, position = rows_.positions[row], n = sequence_of_[row];
        float* q = qkv_ + size_t(row) * projected_;
        float* k = q + p.heads * d;
        float* v = k + p.kv_heads * d;
        const float* angle = layer.frequencies ? turns(row, kind_of(layer)) : nullptr;
        for (int h = 0; h < p.heads + p.kv_heads; ++h) {
            const float* weight = h < p.heads ? layer.query_norm : layer.key_norm;
            if (weight) normalise_head(q + h * d, weight, d, p.eps);
            if (angle) rotate(q + h * d, angle, angle + d / 2, d);
        }
        const int block = rows_.tables[rows_.table_starts[n] + position / BLOCK];
        for (int h = 0; h < p.kv_heads; ++h) {
            const size_t at = place_of(l, block, h);
            store_head(keys_at<T>(at), values_at<T>(at), position % BLOCK, k + h * d, v + h * d, d, head_);
        }
        if (l == p.depth - 1) {  // what was no number in an earlier layer is none in the last
            float s = 0;
            for (int i = 0; i < 2 * p.kv_heads * d; ++i) s += k[i] * 0.f;
            if (s != 0.f) spoiled_[row] = 1;
        }
    }

    template <class T>
    void attend(int thread, int l) {
        const int per_tile = plan_.kv_heads * splits_, items = int(tiles_.size()) * per_tile;
        Counter& next = counters_[2 * l + 1];
        if (!apart_) {
            for (int i; (i = next.n.fetch_add(1, std::memory_order_relaxed)) < items;) attend_tile<T>(thread, l, i, -1);
            return;
        }
        for (int i; (i = next.n.fetch_add(1, std::memory_order_relaxed)) < items * parts_;)
            attend_tile<T>(thread, l, i / parts_, i % parts_);
        team_.wait();
        const auto [a, b] = part(items, thread, team_.size());
        for (int i = a; i < b; ++i) join(thread, i);
    }

    // One tile: all its parts and the mixed values, or one part into `partial_`.
    template <class T>
    void attend_tile(int thread, int l, int item, int only) {
        const Plan& p = plan_;
        const Layer& layer = p.layers[l];
        const int per_tile = p.kv_heads * splits_;
        const AttentionTile& tile = tiles_[item / per_tile];
        const int heads = group_ / splits_, kv = item % per_tile / splits_;
        const int first = kv * group_ + item % splits_ * heads, queries = tile.count * heads, d = p.head_width;
        Own& own = own_[thread];
        const Queries q{own.queries.get(), own.query_codes.get(), own.query_scales.get(), head_};
        const float scale = p.score_scale * 1.44269504f;  // scores are exponents of two
        Sight<T> sight;
        const int length = rows_.positions[rows_.starts[tile.sequence + 1] - 1] + 1;
        int low = length, high = 0;
        for (int r = 0; r < queries; ++r) {
            const int row = tile.row + r / heads, position = rows_.positions[row];
            const int64_t window = layer.window;  // of 31 bits: with a position it may need one more
            const float* from = qkv_ + size_t(row) * projected_ + (first + r % heads) * d;
            float* query = q.floats + r * head_;
            for (int i = 0; i < d; ++i) query[i] = from[i] * scale;
            std::fill(query + d, query + head_, 0.f);
            if (p.narrow) prepare_query(q, r);
            sight.to[r] = p.causal ? position + 1 : window ? int(std::min<int64_t>(length, position + window)) : length;
            sight.from[r] = window ? int(std::max<int64_t>(0, position - window + 1)) : 0;
            low = std::min(low, sight.from[r]);
            high = std::max(high, sight.to[r]);
        }
        const int32_t* table = rows_.tables + rows_.table_starts[tile.sequence];
        const int blocks = (high + BLOCK - 1) / BLOCK;
        const T** keys = (const T**)own.blocks.of(2 * size_t(blocks + AHEAD));
        const T** values = keys + blocks + AHEAD;
        for (int b = low / BLOCK; b < blocks + AHEAD; ++b) {
            const size_t at = place_of(l, table[std::min(b, blocks - 1)], kv);
            keys[b] = keys_at<T>(at);
            values[b] = values_at<T>(at);
        }
        sight.keys = keys;
        sight.values = values;
        const auto attend_part = ATTEND_PART<T>.of[queries];
        if (only >= 0) {
            const size_t at = (size_t(item) * parts_ + only) * MOST_QUERIES;
            if (only * PART < high && (only + 1) * PART > low)
                attend_part(q, sight, only, own.scores.get(), partial_ + at * head_, &outcomes_[at]);
            else std::fill_n(&outcomes_[at], queries, Outcome{-INFINITY, 0.f});
            return;
        }
        float* mixed = own.mixed.get();
        float* more = mixed + size_t(MOST_QUERIES) * head_;
        Outcome outcome[MOST_QUERIES], other[MOST_QUERIES];
        int i = low / PART;
        attend_part(q, sight, i, own.scores.get(), mixed, outcome);
        for (++i; i * PART < high; ++i) {
            attend_part(q, sight, i, own.scores.get(), more, other);
            for (int r = 0; r < queries; ++r) merge(outcome[r], mixed + r * head_, other[r], more + r * head_, head_);
        }
        write(tile, first, heads, mixed, outcome);
    }

    // The parts of one tile, computed apart, in order.
    void join(int thread, int item) {
        const int per_tile = plan_.kv_heads * splits_;
        const AttentionTile& tile = tiles_[item / per_tile];
        const int heads = group_ / splits_, kv = item % per_tile / splits_, first = kv * group_ + item % splits_ * heads;
        float* mixed = own_[thread].mixed.get();
        Outcome outcome[MOST_QUERIES];
        for (int r = 0; r < tile.count * heads; ++r) {
            bool begun = false;
            for (int i = 0; i < parts_; ++i) {
                const size_t at = (size_t(item) * parts_ + i) * MOST_QUERIES + r;
                if (outcomes_[at].most == -INFINITY && outcomes_[at].sum == 0.f) continue;
                if (begun) { merge(outcome[r], mixed + r * head_, outcomes_[at], partial_ + at * head_, head_); continue; }
                outcome[r] = outcomes_[at];
                memcpy(mixed + r * head_, partial_ + at * head_, size_t(head_) * sizeof(float));
                begun = true;
            }
        }
        write(tile, first, heads, mixed, outcome);
    }

    void write(const AttentionTile& tile, int first, int heads, const float* mixed, const Outcome* outcome) {
        const int d = plan_.head_width;
        for (int r = 0; r < tile.count * heads; ++r) {
            float* out = attn_ + size_t(tile.row + r / heads) * attended_ + (first + r % heads) * d;
            const float share = 1.f / outcome[r].sum;
            for (int i = 0; i < d; ++i) out[i] = mixed[r * head_ + i] * share;
        }
    }

    // After the last attention only the wanted rows are computed further.
    void narrow(int thread) {
        const auto [a, b] = part(rows_.wanted_count, thread, team_.size());
        for (int i = a; i < b; ++i) {
            memcpy(last_x_ + size_t(i) * width_, x_ + size_t(rows_.wanted[i]) * width_, size_t(width_) * 4);
            memcpy(last_attn_ + size_t(i) * attended_, attn_ + size_t(rows_.wanted[i]) * attended_, size_t(attended_) * 4);
        }
        team_.wait();
    }

    void answer(int thread) {
        const Plan& p = plan_;
        const Crew crew{*this, thread, true};
        if (!p.generates) {
            const auto [a, b] = part(rows_.wanted_count, thread, team_.size());
            float* row = own_[thread].row.get();
            for (int i = a; i < b; ++i) {
                const float* x = last_x_ + size_t(i) * width_;
                if (p.final_norm.weight) { norm(p.final_norm, x, row); x = row; }
                memcpy(out_ + size_t(i) * out_stride_, x, size_t(p.width) * sizeof(float));
            }
            return;
        }
        for (int a = 0; a < rows_.wanted_count; a += PANEL) {
            const int count = std::min(PANEL, rows_.wanted_count - a);
            float* row = own_[thread].row.get();
            const Operand x = prepared(crew, p.head, {nullptr, 0}, count, true, [&](int r) {
                const float* values = last_x_ + size_t(a + r) * width_;
                if (!p.final_norm.weight) return values;
                norm(p.final_norm, values, row);
                return (const float*)row;
            });
            product(crew, p.head, x, count, {out_ + size_t(a) * out_stride_, out_stride_, STORE, 0});
        }
        const auto [a, b] = part(rows_.wanted_count, thread, team_.size());
        for (int i = a; i < b; ++i) likeliest_[i] = likeliest(out_ + size_t(i) * out_stride_, p.words);
    }

    const Plan plan_;
    Team team_;
    std::vector<Own> own_;
    std::vector<Counter> counters_;
    Counter claims_[CLAIMS];
    int width_, attended_, projected_, hidden_, head_;  // padded
    int group_, splits_, most_inputs_;
    const float* frequencies_[KINDS] = {};
    size_t key_bytes_, value_bytes_;  // of one head in one block
    uint8_t *keys_ = nullptr, *values_ = nullptr;
    // Of the step in progress
    Rows rows_;
    float *out_, *x_, *qkv_, *attn_, *last_x_, *last_attn_, *turns_, *partial_;
    int out_stride_, longest_, parts_;
    bool apart_;
    uint8_t* spoiled_;
    int32_t* likeliest_;
    Room<float> x_room_, qkv_room_, attn_room_, last_x_room_, last_attn_room_, turns_room_, partial_room_;
    Room<uint8_t> key_room_, value_room_;
    std::vector<Outcome> outcomes_;
    std::vector<AttentionTile> tiles_;
    std::vector<int32_t> own_tables_, own_starts_, sequence_of_;
    Who who_, last_who_;  // what is added to each row, to each wanted one
};

}  // namespace

#define EXPORT __attribute__((visibility("default")))

#ifndef MADE_OF
#define MADE_OF ""
#endif

extern "C" {

// A hash of the sources and flags (build.py), by which Python knows a library of its own.
EXPORT const char* polyhead_made_of() { return MADE_OF; }

// Sizes that Python's mirror of the structures must have.
EXPORT int polyhead_sizes(int which) {
    const size_t sizes[] = {sizeof(Plan), sizeof(Layer), sizeof(Linear), sizeof(Rows), sizeof(LowRank), sizeof(Draw)};
    return int(sizes[which]);
}

// Whether all weights are what `format` says, and for INT8 whether they were so before; see pack_narrow.
EXPORT int polyhead_pack(const float* const* rows, int outputs, int inputs, int k, int format, float unit, int only_found,
                         void* out) {
    if (format != FLOAT32) return pack_narrow(rows, outputs, inputs, k, format, unit, only_found, static_cast<uint8_t*>(out));
    pack_float32(rows, outputs, inputs, k, static_cast<float*>(out));
    return 1;
}

EXPORT void polyhead_decode(int kind, const void* blocks, int64_t count, float* out) {
    decode(kind, static_cast<const uint8_t*>(blocks), count, out);
}

// [rows, K] floats times packed weights, on the caller's thread: what a head wants of one matrix.
EXPORT void polyhead_multiply(const Linear* l, const float* x, int rows, float* out) {
    Room<float> floats, scales, offsets;
    Room<int8_t> codes;
    const size_t count = size_t(rows) * l->inputs;
    const Operand operand{floats.of(count), codes.of(count), scales.of(count / SPAN), offsets.of(count / GROUP), l->inputs};
    for (int r = 0; r < rows; ++r) prepare(operand, l->format, r, x + size_t(r) * l->inputs);
    gemm(*l, operand, rows, 0, l->outputs / COLUMNS, {out, l->outputs, STORE, 0});
}

EXPORT Model* polyhead_open(const Plan* plan, int threads) { return new Model(*plan, threads); }
EXPORT void polyhead_close(Model* model) { delete model; }
EXPORT int64_t polyhead_cache_bytes(const Model* model, int values) { return int64_t(model->cache_bytes(values)); }
EXPORT void polyhead_give_cache(Model* model, uint8_t* keys, uint8_t* values) { model->give_cache(keys, values); }
// What of `rows` is out of range, in which case nothing is computed; 0: nothing.
EXPORT int polyhead_step(Model* model, const Rows* rows, float* out, int out_stride, uint8_t* spoiled, int32_t* likeliest) {
    if (const Wrong wrong = model->wrong(*rows, out_stride); wrong != Wrong::NOTHING) return int(wrong);
    model->step(*rows, out, out_stride, spoiled, likeliest);
    return int(Wrong::NOTHING);
}

EXPORT Drawer* polyhead_open_drawer(int threads) { return new Drawer(threads); }
EXPORT void polyhead_close_drawer(Drawer* drawer) { delete drawer; }
EXPORT void polyhead_draw(Drawer* drawer, Draw* draws, int count) { drawer->draw(draws, count); }
}
