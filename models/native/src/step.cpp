// One step of a transformer, compiled: token ids in, logits or states out.
//
// Its input is a Plan (the network; packed_network.py) and StepInput (models/executors/contract.py).  The result of a row
// depends only on that row and on the keys and values of its sequence, so rows may be divided among threads in any way.  Few
// rows are computed together, and each thread computes a share of every product's outputs.  Many rows are cut into panels,
// and a panel goes through a layer on one thread while its numbers stay in that core's cache.
#include <utility>

#include "attention.hpp"
#include "experts.hpp"
#include "gemm.hpp"
#include "pack.hpp"
#include "recurrent.hpp"
#include "rows.hpp"
#include "sample.hpp"
#include "scratch.hpp"
#include "threads.hpp"

enum Order : int32_t { PRE = 0, POST = 1, SANDWICH = 2, INNER = 3, PARALLEL = 4 };
enum HeadNorms : int32_t { SHARED = 0, PER_HEAD = 1, JOINT = 2 };  // weights [D], [H, D], or over all heads [H * D]
// Which tokens of a sequence see all others, and are seen by all: none, the first, those before the first separator, or
// those from the second token after it on.
enum GlobalTokens : int32_t { NO_GLOBAL = 0, FIRST = 1, BEFORE_SEPARATOR = 2, AFTER_SEPARATOR = 3 };
// What of StepInput is out of range; library.py has the messages.
enum class Invalid : int {
    NONE = 0, COUNTS, STARTS, TOKENS, POSITIONS, SEGMENTS, BLOCKS, OUTPUT_ROWS, ADAPTERS, CACHE, STATES
};
constexpr int UNFINISHED = -1;  // the result of a step
enum Product { INPUT = 0, OUTPUT = 1, UP = 2, DOWN = 3, PRODUCTS = 4 };

struct Layer {
    Norm attention_norm, mlp_norm, attention_post_norm, mlp_post_norm;
    Norm query_norm, key_norm;     // of HeadNorms' shapes
    Norm value_norm;               // of each head's values [D], by RMS
    Norm input_norm;               // of what `input_up` gives
    const float* frequencies;      // [R / 2], or null: queries and keys are not rotated
    const float* sinks;            // [H] scores for no key, or null
    int64_t window;                // tokens; 0: no window
    float magnitude;               // by which rotated queries and keys are multiplied
    int32_t mixer;                 // what mixes rows: attention, or one of Mixer
    int32_t order;                 // of norms and parts: Order
    int32_t gated;                 // the mixed values of attention are multiplied by a gate
    int32_t kv_heads, head_width;  // of attention
    int32_t rotary_width;          // the first features of a head, which are rotated
    int32_t key_layer;             // whose keys and values it reads: its own number, or that of an earlier layer
    int32_t tied_values;           // values are the keys before their norm
    float score_scale;
    float output_scale;            // of the layer's output
    int32_t unused;
    Linear input;                  // queries, keys, values and the gate; or what the recurrent mixer reads
    Linear output;                 // of the mixer; NO_MIXER has neither
    Linear up, down;               // gate and up side by side in each block where the MLP is gated; without weights: no MLP
    Linear input_gate, input_up;   // of the layer's own embeddings, behind the MLP; without weights: none
    const Mixture* mixture;        // in place of `up` and `down`, or null
    RecurrentWeights recurrent;
};

struct Plan {
    int32_t width, depth, heads, mlp_width;
    int32_t causal, norm, activation, gated, generates;
    int32_t block_count;     // of the cache; 0: no cache, sequences come whole
    int32_t window_blocks;   // of windowed layers, numbered from block_count on; 0: they use those of other layers
    int32_t state_count;     // slots of states of recurrent layers; 0: there are no such layers, or there is no cache
    int32_t narrow;          // keys and values are codes, token embeddings bf16
    int32_t position_offset;
    int32_t vocab_size;      // V
    int32_t position_count;  // P minus the offset; 0: there is no table of positions
    int32_t segment_count;   // S
    int32_t embedding_width; // E: W, or another width that `projection` has as its inputs
    int32_t rotary_width;    // R: the most features of a head that are rotated
    int32_t head_norms;
    int32_t layer_embedding; // P: features of a token's embedding for each layer; 0: there is none
    // GlobalTokens.  Where there are such tokens, each layer has as many query, key and value heads again, behind the
    // others: the second projections, with which global tokens attend.
    int32_t global_tokens, separator;
    float eps, embedding_scale;
    float score_cap;         // scores s become cap * tanh(s / cap); 0: they do not
    float residual_scale;    // of the output of each part
    float logit_scale;
    float logit_cap;         // as `score_cap`, of scaled logits
    const void* tokens;      // [V, E]; null: the rows of `head`
    const float* positions;  // [P, E], or null
    const float* segments;   // [S, E], or null
    const float* rates;      // [H] what each token of distance takes from a score, or null
    Norm embedding_norm, final_norm;
    Linear projection;       // of embeddings; without weights: none
    Linear head;             // generates
    const void* layer_tokens;  // [V, depth * P], as `tokens`
    Linear layer_projection;   // of embeddings to [depth * P]
    Norm layer_norm;           // of each P of them
    Routing routing;         // of the layers with experts
    Recurrence recurrence;   // of the recurrent layers
    const Layer* layers;     // [depth]
};

struct StepInput {
    int32_t count, sequences, output_count;
    int32_t rank;                                  // the largest rank of the adapters
    const int32_t *tokens, *positions, *segments;  // [T]; segments may be null: all 0
    const int32_t* starts;                         // [N + 1]
    const int32_t *block_tables, *table_starts;    // of sequence n: block_tables[table_starts[n] .. table_starts[n + 1])
    // As these, of windowed layers that have their own blocks; a table ends with the block of the sequence's last row, and
    // begins where the window of its first row does, or before.
    const int32_t *window_tables, *window_starts;
    const int32_t* output_rows;                    // [M], ascending
    const LowRank* const* adapters;                // [N] the adapter of each sequence, PRODUCTS updates a layer, or
                                                   // null; null: no sequence has one
    const StateUse* uses;                          // [N], where there are state slots
    float* states;                                 // [depth][T][width] each layer's output for each row, or null: not
                                                   // written; of the last layer only the output rows
};

namespace {

constexpr int PANEL = 128;   // rows
constexpr int KINDS = 2;     // of rotations: a layer uses one of at most two lists of frequencies
constexpr int GRAINS = 6;    // pieces of a product for each thread
constexpr int STREAMED = 8;  // rows up to which a product is limited by memory, which is read fastest in sequence: one piece
constexpr int CLAIMS = 4;    // products whose counters may be in use or being reset at once
constexpr int RUN = 16;      // blocks stored side by side in a layer: all layers of a run before the next run, so
                             // that the cache takes memory as it is used
constexpr float EXPONENT = 1.44269504f;  // scores are exponents of two, since e^x = 2^(x * this)
constexpr int FEW = 4;       // rows that every thread prepares for itself, instead of waiting for the others
constexpr int FEW_OF_EXPERTS = 16;  // so, of the rows of all experts together
constexpr int READING = 4;   // rows of an expert whose arithmetic takes about as long as reading its weights
constexpr int SLAB = 512;    // rows that go through the experts of a layer together: more would take more memory
// The parts of a step, after the embeddings, for each layer and then for the output rows: the experts of the layer before,
// what is computed by panels of rows, and what mixes rows or writes the output.
enum Stages : int { EXPERTS = 0, ROWS = 1, MIXES = 2, STAGES = 3 };
enum Counters : int { PANELS = 0, TILES = 1, SCORED = 2, ATTENDED = 3, COUNTERS = 4 };  // of a layer

constexpr int padded(int n, int to = PADDING) { return (n + to - 1) / to * to; }

struct ThreadScratch {  // of one thread
    Scratch<float> floats, scales, offsets, row, hidden, sandwich, scores, mixed, low, queries, query_scales;
    Scratch<float> state;  // a tile, where states are not kept
    Scratch<int8_t> codes;
    Scratch<int16_t> query_codes;
    Scratch<const void*> blocks;
    Scratch<float> normed;    // rows that every thread prepares for itself
    Scratch<Choice> choices;  // of those rows
    RoutingScratch routing;
    RowsByExpert sorted;
    std::vector<ExpertPiece> pieces;
    int product = 0;  // how many products were computed together in this step
};

struct AttentionTile {
    int sequence, row, count;
};

// Heads of attention, which layers may share or differ in, and the tiles of a step for them.
struct HeadShape {
    int kv_heads, width, head;  // `head`: the width, padded
    int group, splits;          // query heads of a key head, and parts of those for a tile
    size_t bytes[2];            // of the keys and of the values of a head in a block
    std::vector<AttentionTile> tiles;
    bool split_parts;
    int per_tile() const { return kv_heads * splits; }
    int items() const { return int(tiles.size()) * per_tile(); }
};

// Columns of a layer between its products: features of mixed values, outputs of the input product before the gate, and
// where values begin.
struct LayerColumns {
    int inner, before_gate, values;
};

std::pair<int, int> part(int n, int i, int of) { return {int(int64_t(n) * i / of), int(int64_t(n) * (i + 1) / of)}; }

using Clock = std::chrono::steady_clock;
using TurnEnd = Clock::time_point;
constexpr TurnEnd NO_END = TurnEnd::max();
TurnEnd turn_end(int64_t turn) { return turn ? Clock::now() + std::chrono::nanoseconds(turn) : NO_END; }

class Model {
  public:
    Model(const Plan& plan, int threads) : plan_(plan), own_team_(threads), scratch_(threads), counters_(COUNTERS * plan.depth + 3) {
        const Plan& p = plan_;
        width_ = padded(p.width);
        embedded_ = padded(p.embedding_width);
        hidden_ = padded(std::max(p.mlp_width, p.layer_embedding));
        place_mixers();
        max_inputs_ = std::max({width_, embedded_, attended_, hidden_});
        each_ = p.routing.chosen + (p.routing.shared ? 1 : 0);
        for (int l = 0; l < p.depth; ++l) {
            if (!p.layers[l].mixture) continue;
            const Expert* experts = p.layers[l].mixture->experts;
            const int inner = experts[0].down.inputs, shared = p.routing.shared ? experts[p.routing.count].down.inputs : 0;
            max_inputs_ = std::max({max_inputs_, inner, shared});
            inner_ = std::max(inner_, p.routing.chosen * inner + shared);
            scored_ = p.layers[l].mixture->router.outputs;
            norms_parts_ |= p.layers[l].mixture->norms_parts();
        }
        for (int l = 0; l < p.depth; ++l) {
            const Layer& layer = p.layers[l];
            if (!layer.frequencies) continue;
            const int kind = frequencies_[0] && layer.frequencies != frequencies_[0];
            frequencies_[kind] = layer.frequencies;
            magnitudes_[kind] = layer.magnitude;
            rotary_widths_[kind] = layer.rotary_width;
        }
        for (int i = 0; i < threads; ++i) reserve_scratch(scratch_[i]);
    }

    void set_cache(uint8_t* keys, uint8_t* values, float* states) {
        kept_[0] = keys; kept_[1] = values; slots_ = states;
        past_cache_ = !EXACT && reinterpret_cast<uintptr_t>(states) % sizeof(Floats) == 0;  // a sanitizer sees plain stores
    }
    // Bytes of the cache's keys (0), its values (1), and all state slots (2).
    size_t cache_bytes(int which) const {
        if (which == 2) return size_t(plan_.state_count) * state_numbers_ * sizeof(float);
        if (!plan_.block_count) return 0;
        const size_t own = size_t(padded(plan_.window_blocks, RUN)) * block_bytes_[1][which];
        return size_t(padded(plan_.block_count, RUN)) * block_bytes_[0][which] + own;
    }
    // Bytes of a layer's keys (0) or values (1) in a block.
    size_t layer_bytes(int which, int l) const {
        const bool own = plan_.layers[l].mixer == ATTENTION && plan_.layers[l].key_layer == l;
        return own ? shape_of(l).kv_heads * shape_of(l).bytes[which] : 0;
    }

    // Compares every number of `rows` with the size of what it indexes; lengths of arrays cannot be checked here.
    Invalid check(const StepInput& rows, int out_stride) {
        const Plan& p = plan_;
        const int width = p.generates ? p.head.outputs : p.width;
        if (rows.count < 1 || rows.sequences < 1 || rows.rank < 0 || out_stride < width) return Invalid::COUNTS;
        if (rows.output_count < 0 || rows.output_count > rows.count) return Invalid::COUNTS;
        if (p.block_count && !(kept_[0] && kept_[1] && slots_)) return Invalid::CACHE;
        if (rows.starts[0] != 0) return Invalid::STARTS;
        for (int n = 0; n < rows.sequences; ++n)
            if (rows.starts[n + 1] <= rows.starts[n] || rows.starts[n + 1] > rows.count) return Invalid::STARTS;
        if (rows.starts[rows.sequences] != rows.count) return Invalid::STARTS;
        for (int row = 0; row < rows.count; ++row) {
            if (!below(rows.tokens[row], p.vocab_size)) return Invalid::TOKENS;
            const int position = rows.positions[row];
            if (position < 0 || (p.positions && position >= p.position_count)) return Invalid::POSITIONS;
            if (p.segments && !below(rows.segments ? rows.segments[row] : 0, p.segment_count)) return Invalid::SEGMENTS;
        }
        for (int i = 0; i < rows.output_count; ++i)
            if (!below(rows.output_rows[i], rows.count) || (i && rows.output_rows[i] <= rows.output_rows[i - 1]))
                return Invalid::OUTPUT_ROWS;
        if (p.block_count && rows.table_starts[0] != 0) return Invalid::BLOCKS;
        for (int n = 0; n < rows.sequences; ++n) {
            const int start = rows.starts[n], end = rows.starts[n + 1];
            for (int row = start + 1; row < end; ++row)  // consecutive; none is negative, so the difference cannot overflow
                if (rows.positions[row] - rows.positions[row - 1] != 1) return Invalid::POSITIONS;
            if (!p.block_count) {
                if (rows.positions[start] != 0) return Invalid::POSITIONS;
                continue;
            }
            const int first = rows.table_starts[n], last = rows.table_starts[n + 1];
            if (last < first || rows.positions[end - 1] / BLOCK >= last - first) return Invalid::BLOCKS;
            for (int i = first; i < last; ++i)
                if (!below(rows.block_tables[i], p.block_count)) return Invalid::BLOCKS;
        }
        if (window_ && !are_windows_valid(rows)) return Invalid::BLOCKS;
        for (int n = 0; rows.adapters && n < rows.sequences; ++n) {
            const LowRank* low = rows.adapters[n];
            if (!low || (n && low == rows.adapters[n - 1])) continue;
            for (int i = 0; i < p.depth * PRODUCTS; ++i)
                if (low[i].rank < 0 || low[i].rank > rows.rank) return Invalid::ADAPTERS;
        }
        return p.block_count && last_recurrent_ >= 0 && !are_valid(rows) ? Invalid::STATES : Invalid::NONE;
    }

    // Begins a step, and computes it until `end`; see `resume`.  `alone`: on the caller's thread only.
    bool step(const StepInput& rows, float* out, int out_stride, uint8_t* nonfinite, int32_t* argmax, TurnEnd end, bool alone) {
        team_ = alone ? &lone_team_ : &own_team_;
        whole_ = {rows, out, nonfinite, argmax};
        out_stride_ = out_stride;
        memset(nonfinite, 0, size_t(rows.count));
        next_sequence_ = 0;
        team_->choose_size();
        begin_portion();
        return compute_turn(end);
    }

    // Runs f(thread) on all threads, while no step is computed on them.
    template <class F>
    void run(F&& f) {
        own_team_.choose_size();
        own_team_.run(f);
    }

    // Goes on with a step until `end`, and until each thread has finished its piece: a panel of rows, or a tile of
    // attention.  No end, or a network with experts or recurrent layers: until it is finished.  Returns whether it is.
    // The results are the same whatever the turns.
    bool resume(TurnEnd end) {
        team_ = &own_team_;
        team_->choose_size();
        if (stage_ && (stage_ - 1) % STAGES == MIXES) planned_threads_ = team_->size();  // no panels are begun and unfinished
        return compute_turn(end);
    }

  private:
    static bool below(int32_t number, int32_t count) { return number >= 0 && number < count; }

    // Whether the blocks of windowed layers exist and hold all tokens that a row sees.  Positions are valid.
    bool are_windows_valid(const StepInput& rows) const {
        if (!rows.window_tables || !rows.window_starts || rows.window_starts[0] != 0) return false;
        for (int n = 0; n < rows.sequences; ++n) {
            const int64_t first = rows.window_starts[n], last = rows.window_starts[n + 1];
            const int64_t seen = std::max<int64_t>(0, rows.positions[rows.starts[n]] - window_ + 1);
            const int64_t end = rows.positions[rows.starts[n + 1] - 1] / BLOCK + 1;
            if (last - first < end - seen / BLOCK || last - first > end) return false;
            for (int64_t i = first; i < last; ++i) {
                const int64_t block = rows.window_tables[i];
                if (block < plan_.block_count || block >= int64_t(plan_.block_count) + plan_.window_blocks) return false;
            }
        }
        return true;
    }

    // Whether the state slots of a step exist, and none is written that another sequence reads or writes.
    bool are_valid(const StepInput& rows) {
        if (!rows.uses) return false;
        const int count = plan_.state_count;
        slot_uses_.assign(count, UNUSED);
        const auto write = [&](int slot) {
            if (!below(slot, count) || slot_uses_[slot] != UNUSED) return false;
            slot_uses_[slot] = WRITTEN;
            return true;
        };
        for (int n = 0; n < rows.sequences; ++n) {
            const int slot = rows.uses[n].read;
            if ((slot == -1) != (rows.positions[rows.starts[n]] == 0)) return false;
            if (slot == -1) continue;
            if (!below(slot, count)) return false;
            slot_uses_[slot] = READ;
        }
        for (int n = 0; n < rows.sequences; ++n) {
            const StateUse& use = rows.uses[n];
            if (!write(use.write)) return false;
            if (use.border_rows < 0 || use.border_rows > rows.starts[n + 1] - rows.starts[n]) return false;
            if (use.border_rows ? !write(use.border) : use.border != -1) return false;
        }
        return true;
    }

    // Where the layers' keys, values and states are, and how wide the rows between their products are.
    void place_mixers() {
        const Plan& p = plan_;
        for (int kind = CONVOLUTION; kind <= DELTA; ++kind) shapes_[kind] = mixer_shape(kind, p.recurrence, p.width);
        step_stride_ = padded(p.recurrence.heads, LANES);
        for (int l = 0; l < p.depth; ++l) {
            const int mixer = p.layers[l].mixer;
            const MixerShape& shape = shapes_[mixer];
            LayerColumns columns{shape.inner, shape.columns, 0};
            if (mixer == ATTENTION) columns = place_heads(l);
            const int gate = p.layers[l].gated ? columns.inner : 0;
            const int copied = mixer == ATTENTION && p.layers[l].tied_values && p.layers[l].key_layer == l ? shape_of(l).kv_heads * shape_of(l).width : 0;
            attended_ = std::max(attended_, padded(columns.inner));
            projected_ = std::max(projected_, padded(columns.before_gate + gate + copied));
            channels_ = std::max(channels_, shape.tiles ? shape.channels : 0);
            columns_.push_back(columns);
            places_.push_back(state_numbers_);
            own_blocks_.push_back(has_own_blocks(l));
            if (own_blocks_[l]) window_ = std::max(window_, p.layers[l].window);
            if (mixer == ATTENTION || mixer == NO_MIXER) continue;
            last_recurrent_ = l;
            state_numbers_ += size_t(p.recurrence.kernel - 1) * shape.channels + shape.tiles * tile_numbers();
        }
        if (last_recurrent_ < 0) step_stride_ = 0;
        no_state_.assign(tile_numbers(), 0.f);
        place_keys();
    }

    // The heads of a layer with attention, and its columns.
    LayerColumns place_heads(int l) {
        const Layer& layer = plan_.layers[l];
        const int width = layer.head_width, group = projected_heads() / layer.kv_heads;
        size_t i = 0;
        while (i < head_shapes_.size() && (head_shapes_[i].kv_heads != layer.kv_heads || head_shapes_[i].width != width)) ++i;
        if (i == head_shapes_.size()) {
            HeadShape shape{};
            shape.kv_heads = layer.kv_heads; shape.width = width; shape.head = padded(width, FEATURES); shape.group = group;
            shape.splits = (group + MAX_QUERIES - 1) / MAX_QUERIES;
            while (group % shape.splits) ++shape.splits;
            shape.bytes[0] = plan_.narrow ? key_bytes<Codes>(shape.head) : key_bytes<float>(shape.head);
            shape.bytes[1] = plan_.narrow ? value_bytes<Codes>(shape.head) : value_bytes<float>(shape.head);
            head_ = std::max(head_, shape.head);
            head_shapes_.push_back(shape);
        }
        shape_numbers_.resize(plan_.depth);
        shape_numbers_[l] = int(i);
        const int inner = plan_.heads * width, queries = projected_heads() * width, kept = layer.kv_heads * width;
        if (layer.key_layer != l) return {inner, queries, 0};
        last_kept_ = l;
        if (!layer.tied_values) return {inner, queries + 2 * kept, queries + kept};
        return {inner, queries + kept, queries + kept + (layer.gated ? queries : 0)};
    }
    // Query heads of a layer, those of the second projections included.
    int projected_heads() const { return plan_.heads * (plan_.global_tokens ? 2 : 1); }

    // Where the keys and values of the layers are.  Without a cache, layers that no other layer reads share one place.
    void place_keys() {
        const Plan& p = plan_;
        for (int which = 0; which < 2; ++which) {
            std::vector<size_t>& places = kept_places_[which];
            places.assign(p.depth, 0);
            size_t shared = 0, ends[2] = {};
            std::vector<bool> is_read(p.depth, p.block_count > 0);
            for (int l = 0; l < p.depth; ++l) {
                if (p.layers[l].mixer == ATTENTION && p.layers[l].key_layer != l) is_read[p.layers[l].key_layer] = true;
                shared = std::max(shared, layer_bytes(which, l));
            }
            if (!p.block_count) ends[0] = shared;
            for (int l = 0; l < p.depth; ++l) {
                if (p.layers[l].mixer != ATTENTION) continue;
                if (p.layers[l].key_layer != l) { places[l] = places[p.layers[l].key_layer]; continue; }
                if (!is_read[l]) continue;
                size_t& end = ends[own_blocks_[l]];
                places[l] = end;
                end += layer_bytes(which, l);
            }
            for (int own = 0; own < 2; ++own) block_bytes_[own][which] = ends[own];
            own_start_[which] = size_t(padded(p.block_count, RUN)) * ends[0];
        }
    }
    const HeadShape& shape_of(int l) const { return head_shapes_[shape_numbers_[l]]; }
    size_t tile_numbers() const { return size_t(plan_.recurrence.key_width) * TILE; }

    struct alignas(64) Counter { std::atomic<int> n{0}; };

    void reserve_scratch(ThreadScratch& scratch) {
        const size_t inputs = size_t(PANEL) * max_inputs_;
        scratch.floats.reserve(inputs); scratch.codes.reserve(inputs);
        scratch.scales.reserve(inputs / SPAN); scratch.offsets.reserve(inputs / GROUP);
        scratch.row.reserve(max_inputs_);
        if (last_recurrent_ >= 0) scratch.state.reserve(tile_numbers());
        scratch.hidden.reserve(size_t(PANEL) * hidden_);
        scratch.sandwich.reserve(size_t(PANEL) * width_);
        scratch.scores.reserve(size_t(MAX_QUERIES) * PART);
        scratch.mixed.reserve(size_t(3 * MAX_QUERIES) * head_);
        scratch.queries.reserve(size_t(MAX_QUERIES) * head_);
        scratch.query_codes.reserve(size_t(MAX_QUERIES) * head_);
        scratch.query_scales.reserve(size_t(MAX_QUERIES) * head_ / FEATURES);
    }

    void reserve_experts(size_t rows) {
        const size_t slab = std::min(rows, size_t(SLAB)), inner = slab * inner_;
        normed_ = normed_scratch_.reserve(rows * width_);
        logits_ = logits_scratch_.reserve(rows * scored_);
        choices_ = choices_scratch_.reserve(rows * each_);
        mixed_ = mixed_scratch_.reserve((norms_parts_ ? 2 : 1) * slab * width_);
        inner_x_ = {inner_floats_.reserve(inner), inner_codes_.reserve(inner), inner_scales_.reserve(inner / SPAN),
                    inner_offsets_.reserve(inner / GROUP), 0};
        for (auto& scratch : scratch_) {
            scratch.normed.reserve(size_t(FEW) * width_);
            scratch.choices.reserve(size_t(FEW) * each_);
        }
    }

    // Plans the step: the tiles of attention, and the blocks of sequences without a cache.
    void plan_step() {
        longest_ = 0;
        for (int n = 0; n < rows_.sequences; ++n)
            longest_ = std::max(longest_, rows_.positions[rows_.starts[n + 1] - 1] + 1);
        if (!plan_.block_count) {
            local_tables_.clear(); local_starts_.assign(1, 0);
            for (int n = 0, next = 0; n < rows_.sequences; ++n) {
                const int blocks = (rows_.starts[n + 1] - rows_.starts[n] + BLOCK - 1) / BLOCK;
                for (int b = 0; b < blocks; ++b) local_tables_.push_back(next++);
                local_starts_.push_back(next);
            }
            rows_.block_tables = local_tables_.data();
            rows_.table_starts = local_starts_.data();
            for (int which = 0; which < 2; ++which)
                kept_[which] = kept_scratch_[which].reserve(local_tables_.size() * block_bytes_[0][which]);
        }
        global_.assign(rows_.sequences, {0, 0});
        for (int n = 0; plan_.global_tokens && n < rows_.sequences; ++n) global_[n] = find_global(n);
        sequence_of_.resize(rows_.count);
        for (int n = 0; n < rows_.sequences; ++n)
            std::fill(sequence_of_.begin() + rows_.starts[n], sequence_of_.begin() + rows_.starts[n + 1], n);
        if (rows_.adapters) {
            row_adapters_.resize(rows_.count);
            last_row_adapters_.resize(rows_.output_count);
            for (int row = 0; row < rows_.count; ++row) row_adapters_[row] = rows_.adapters[sequence_of_[row]];
            for (int i = 0; i < rows_.output_count; ++i) last_row_adapters_[i] = row_adapters_[rows_.output_rows[i]];
        }
        parts_ = (longest_ + PART - 1) / PART;
        size_t most_items = 0, most_numbers = 0;
        for (HeadShape& shape : head_shapes_) {
            plan_tiles(shape);
            if (!shape.split_parts) continue;
            const size_t items = size_t(shape.items()) * parts_ * MAX_QUERIES;
            most_items = std::max(most_items, items);
            most_numbers = std::max(most_numbers, items * shape.head);
        }
        if (!most_items) return;
        partial_ = partial_scratch_.reserve(most_numbers);
        outcomes_.resize(most_items);
    }

    // The places [first, second) of the global tokens of a sequence.  Without a separator there are none.
    std::pair<int, int> find_global(int n) const {
        const int count = rows_.starts[n + 1] - rows_.starts[n];
        if (plan_.global_tokens == FIRST) return {0, 1};
        const int32_t* tokens = rows_.tokens + rows_.starts[n];
        const int at = int(std::find(tokens, tokens + count, plan_.separator) - tokens);
        if (plan_.global_tokens == BEFORE_SEPARATOR) return {0, at == count ? 0 : at};
        return {std::min(at + 2, count), count};
    }

    void plan_tiles(HeadShape& shape) {
        const int heads = shape.group / shape.splits, most = std::max(1, MAX_QUERIES / heads);
        shape.tiles.clear();
        for (int n = 0; n < rows_.sequences; ++n) {
            const int start = rows_.starts[n], end = rows_.starts[n + 1];
            for (int row = start; row < end; row += most) shape.tiles.push_back({n, row, std::min(most, end - row)});
        }
        shape.split_parts = parts_ > 1 && shape.items() < 4 * team_->size();
    }

    // The threads that compute some rows: all of them together, each a share, or this one alone.
    struct ThreadGroup {
        Model& model;
        int thread;
        bool together;
        void meet() const { if (together) model.team_->wait(); }
        std::pair<int, int> share(int n) const {
            return together ? part(n, thread, model.team_->size()) : std::pair(0, n);
        }
    };

    // Rows that go through all layers before the next ones, from `next_sequence_` on: of a cache all, otherwise whole
    // sequences of about a panel for each thread, whose numbers are in the processor's caches from one product to the next.
    void begin_portion() {
        const StepInput& all = whole_.rows;
        const int first = next_sequence_, row = all.starts[first];
        const int share = PANEL * team_->size(), portions = (all.count + share - 1) / share;
        const int each = plan_.block_count || all.states ? all.count : (all.count + portions - 1) / portions;
        const int64_t bound = (int64_t(row) / each + 1) * each;
        do ++next_sequence_; while (next_sequence_ < all.sequences && all.starts[next_sequence_] < bound);
        const int end = all.starts[next_sequence_];
        const int32_t* outputs_end = all.output_rows + all.output_count;
        const int32_t* outputs = std::lower_bound(all.output_rows, outputs_end, row);
        portion_outputs_.assign(outputs, std::lower_bound(outputs, outputs_end, end));
        portion_starts_.assign(all.starts + first, all.starts + next_sequence_ + 1);
        for (int32_t& output : portion_outputs_) output -= row;
        for (int32_t& start : portion_starts_) start -= row;
        rows_ = all;
        rows_.count = end - row; rows_.sequences = next_sequence_ - first; rows_.output_count = int(portion_outputs_.size());
        rows_.tokens += row; rows_.positions += row;
        if (rows_.segments) rows_.segments += row;
        if (rows_.adapters) rows_.adapters += first;
        rows_.starts = portion_starts_.data(); rows_.output_rows = portion_outputs_.data();
        const size_t first_output = size_t(outputs - all.output_rows);
        out_ = whole_.out + first_output * out_stride_; argmax_ = whole_.argmax + first_output;
        nonfinite_ = whole_.nonfinite + row;
        reserve_rows();
        plan_step();
        for (auto& counter : counters_) counter.n.store(0, std::memory_order_relaxed);
        planned_threads_ = team_->size();
        stage_ = 0;
    }

    void reserve_rows() {
        const size_t t = size_t(rows_.count);
        x_ = x_scratch_.reserve(t * width_);
        projections_ = projections_scratch_.reserve(t * projected_ + LANES);  // a run's last load may reach behind it
        attn_ = attn_scratch_.reserve(t * attended_);
        convolved_ = convolved_scratch_.reserve(t * channels_);
        steps_ = steps_scratch_.reserve(t * 2 * step_stride_);
        last_x_ = last_x_scratch_.reserve(size_t(rows_.output_count) * width_);
        last_attn_ = last_attn_scratch_.reserve(size_t(rows_.output_count) * attended_);
        rotations_ = rotations_scratch_.reserve(2 * t * KINDS * (plan_.rotary_width / 2));
        if (plan_.layer_embedding) layer_inputs_ = layer_inputs_scratch_.reserve(t * plan_.layer_projection.outputs);
        if (plan_.projection.weights) embeddings_ = embeddings_scratch_.reserve(t * embedded_);
        if (inner_) reserve_experts(t);
        for (auto& scratch : scratch_) scratch.low.reserve(size_t(PANEL) * rows_.rank);
    }

    bool compute_turn(TurnEnd end) {
        has_turn_ = end != NO_END && !inner_ && last_recurrent_ < 0;
        turn_end_ = end;
        while (compute_portion()) {
            if (next_sequence_ == whole_.rows.sequences) return true;
            begin_portion();
            if (is_turn_over()) break;
        }
        return false;
    }

    bool compute_portion() {
        for (auto& claims : claims_) claims.n.store(team_->size(), std::memory_order_relaxed);
        for (auto& scratch : scratch_) scratch.product = 0;
        team_->run([this](int thread) { compute(thread); });
        const bool is_finished = stage_ == stage_count();
        if (is_finished) team_->adapt();  // at the end of other turns threads wait for the last piece
        return is_finished;
    }

    bool is_turn_over() const { return has_turn_ && Clock::now() >= turn_end_; }

    // Calls f for all panels of `count` rows that no earlier turn has computed, until the turn is over.  Returns on all
    // threads at once: whether all panels are computed.
    template <class F>
    bool each_panel(int thread, int count, Counter& next, F&& f) {
        if (count <= std::min(PANEL, STREAMED * planned_threads_)) {  // limited by memory: the weights are read once
            if (count) f(ThreadGroup{*this, thread, true}, 0, count);
            team_->wait();
            return true;
        }
        // As many panels for each thread, so that none waits for another's last one.
        const int share = PANEL * planned_threads_, panels = (count + share - 1) / share * planned_threads_;
        const int size = (count + panels - 1) / panels;
        for (int a; (a = next.n.fetch_add(1, std::memory_order_relaxed) * size) < count;) {
            f(ThreadGroup{*this, thread, false}, a, std::min(count, a + size));
            if (is_turn_over()) break;
        }
        team_->wait();
        return next.n.load(std::memory_order_relaxed) * size >= count;
    }

    int stage_count() const { return 1 + STAGES * (plan_.depth + 1); }

    void compute(int thread) {
        int stage = stage_;  // read before the first wait: thread 0 writes it after the last one
        while (stage < stage_count() && compute_stage(thread, stage)) ++stage;
        if (thread == 0) stage_ = stage;
    }

    // Computes a stage, or what is left of it.  Returns on all threads: whether it is finished, or the turn was over before.
    bool compute_stage(int thread, int stage) {
        if (stage == 0) return embed_rows(thread);
        const int l = (stage - 1) / STAGES, before = l - 1, part = (stage - 1) % STAGES;
        const bool is_output = l == plan_.depth, mixed = l && plan_.layers[before].mixture;
        const int count = is_output ? rows_.output_count : rows_.count;
        const LayerRows rows = is_output ? LayerRows{last_x_, last_attn_, rows_.output_rows} : LayerRows{x_, attn_, nullptr};
        const RowAdapters& adapters = is_output ? last_row_adapters_ : row_adapters_;
        if (part == EXPERTS) {
            if (is_output) select_output_rows(thread);
            if (mixed) finish_mixed_layer(thread, before, rows, adapters, count);
            return true;
        }
        if (part == ROWS)
            return each_panel(thread, count, counters_[COUNTERS * l + PANELS], [&](const ThreadGroup& group, int a, int b) {
                if (l && !mixed) finish_layer(group, before, rows, adapters, a, b);
                if (l && rows_.states) copy_states(group, before, rows.x, rows.numbers, a, b);
                if (!is_output && plan_.layers[l].mixer != NO_MIXER) project_input(group, l, a, b);
            });
        if (!is_output) return mix_rows(thread, l);
        write_output(thread);
        return true;
    }

    // The inputs of the first layer, and those that all layers have from the embeddings.
    bool embed_rows(int thread) {
        const auto [a, b] = part(rows_.count, thread, team_->size());
        for (int row = a; row < b; ++row) embed(row);
        team_->wait();
        const auto project = [&](const ThreadGroup& group, int a, int b) { project_embeddings(group, a, b); };
        const auto embed_layers = [&](const ThreadGroup& group, int a, int b) { embed_for_layers(group, a, b); };
        Counter* counters = &counters_[COUNTERS * plan_.depth];
        if (plan_.projection.weights && !each_panel(thread, rows_.count, counters[1], project)) return false;
        return !plan_.layer_embedding || each_panel(thread, rows_.count, counters[2], embed_layers);
    }

    const float* rotation(int row, int kind) const {
        return rotations_ + (size_t(row) * KINDS + kind) * 2 * (plan_.rotary_width / 2);
    }
    int kind_of(const Layer& layer) const { return layer.frequencies == frequencies_[0] ? 0 : 1; }

    void embed(int row) {
        const Plan& p = plan_;
        const int width = p.embedding_width, stride = p.projection.weights ? embedded_ : width_;
        float* x = (p.projection.weights ? embeddings_ : x_) + size_t(row) * stride;
        const int position = rows_.positions[row];
        if (!p.tokens) weights_of(p.head, rows_.tokens[row], x);
        else {
            const size_t token = size_t(rows_.tokens[row]) * width;
            for (int i = 0; i < width; ++i)
                x[i] = p.narrow ? widen(((const bf16*)p.tokens)[token + i]) : ((const float*)p.tokens)[token + i];
        }
        for (int i = 0; i < width; ++i) x[i] *= p.embedding_scale;
        std::fill(x + width, x + stride, 0.f);  // a NaN row has made its padding NaN
        if (p.segments) {
            const float* segment = p.segments + size_t(rows_.segments ? rows_.segments[row] : 0) * width;
            for (int i = 0; i < width; ++i) x[i] += segment[i];
        }
        if (p.positions) {
            const float* vector = p.positions + size_t(position + p.position_offset) * width;
            for (int i = 0; i < width; ++i) x[i] += vector[i];
        }
        if (p.projection.weights) std::fill_n(x_ + size_t(row) * width_ + p.width, width_ - p.width, 0.f);
        if (p.embedding_norm.weight) normalise(NormKind(p.norm), p.embedding_norm, p.eps, x, width, stride, x);
        for (int kind = 0; kind < KINDS; ++kind) {
            const float* f = frequencies_[kind];
            const int half = rotary_widths_[kind] / 2;
            if (!f) continue;
            float* out = const_cast<float*>(rotation(row, kind));
            for (int d = 0; d < half; ++d) {
                const float angle = float(position) * f[d];
                out[d] = std::cos(angle) * magnitudes_[kind];
                out[half + d] = std::sin(angle) * magnitudes_[kind];
            }
        }
    }

    // Embeddings of rows [a, b) to the width of the layers.
    void project_embeddings(const ThreadGroup& group, int a, int b) {
        const Operand x = prepare_rows(group, plan_.projection, {nullptr, 0}, b - a, true,
                                       [&](int r) { return embeddings_ + size_t(a + r) * embedded_; });
        product(group, plan_.projection, x, b - a, {x_ + size_t(a) * width_, width_, STORE, 0}, &plan_.layers[0].input);
    }

    // The embeddings of rows [a, b) for all layers: those of a table, and those projected from the rows.
    void embed_for_layers(const ThreadGroup& group, int a, int b) {
        const Plan& p = plan_;
        const int each = p.layer_embedding, stride = p.layer_projection.outputs;
        const Operand x = prepare_rows(group, p.layer_projection, {nullptr, 0}, b - a, true,
                                       [&](int r) { return x_ + size_t(a + r) * width_; });
        product(group, p.layer_projection, x, b - a, {layer_inputs_ + size_t(a) * stride, stride, STORE, 0}, &p.layers[0].input);
        const float projected = 1.f / std::sqrt(float(p.width)), own = std::sqrt(float(each)), both = std::sqrt(0.5f);
        const auto [from, to] = group.share(b - a);
        for (int row = a + from; row < a + to; ++row) {
            const size_t token = size_t(rows_.tokens[row]) * p.depth * each;
            float* out = layer_inputs_ + size_t(row) * stride;
            for (int i = 0; i < p.depth * each; ++i) out[i] *= projected;
            for (int l = 0; l < p.depth; ++l)
                normalise_features(NormKind(p.norm), p.layer_norm.weight, p.layer_norm.bias, p.eps, out + l * each, each);
            for (int i = 0; i < p.depth * each; ++i) {
                const float found = p.narrow ? widen(((const bf16*)p.layer_tokens)[token + i]) : ((const float*)p.layer_tokens)[token + i];
                out[i] = (out[i] + found * own) * both;
            }
        }
    }

    void norm(const Norm& norm, const float* x, float* out) const {
        if (!norm.weight) { if (out != x) memcpy(out, x, size_t(width_) * sizeof(float)); return; }
        normalise(NormKind(plan_.norm), norm, plan_.eps, x, plan_.width, width_, out);
    }

    Operand operand(int thread, int inputs) {
        ThreadScratch& scratch = scratch_[thread];
        return {scratch.floats.get(), scratch.codes.get(), scratch.scales.get(), scratch.offsets.get(), inputs};
    }

    using RowAdapters = std::vector<const LowRank*>;
    struct AdapterUpdates {  // the adapters' updates of a product
        const LowRank* const* adapters;  // the adapters of its rows; null: none
        int which;
    };
    AdapterUpdates adapter_updates(int layer, Product product, const RowAdapters& adapters, int row) const {
        return {rows_.adapters ? adapters.data() + row : nullptr, layer * PRODUCTS + product};
    }

    // Prepares the rows of a product: `values(r)` are row r's floats.  All rows are ready when this returns.
    template <class F>
    Operand prepare_rows(const ThreadGroup& group, const Linear& l, const AdapterUpdates& updates, int count,
                         bool repeatable, F&& values) {
        const bool alone = !group.together || (repeatable && count <= FEW);
        const int owner = alone ? group.thread : 0;
        Operand x = operand(owner, l.inputs);
        x.low = scratch_[owner].low.get(); x.stride = rows_.rank;
        x.adapters = updates.adapters; x.which = updates.which;
        const auto [a, b] = alone ? std::pair(0, count) : group.share(count);
        const float* rows[PANEL];
        for (int r = a; r < b; ++r) {
            rows[r] = values(r);
            prepare(x, l.format, r, rows[r]);
            if (x.adapters && rows[r] == scratch_[group.thread].row.get()) {  // that memory is reused for the next row
                if (l.format != FLOAT32) prepare(x, FLOAT32, r, rows[r]);
                rows[r] = x.floats + size_t(r) * x.inputs;
            }
        }
        if (x.adapters) project_low(x, rows, a, b, x.which + 1 < PRODUCTS * plan_.depth);
        if (!alone) group.meet();
        return x;
    }

    // Threads take a few blocks of the outputs at a time, since one core may be faster than another: first by thread
    // number, then the next free ones.
    void product(const ThreadGroup& group, const Linear& l, const Operand& x, int count, const Target& to,
                 const Linear* after = nullptr) {
        const int blocks = l.outputs / COLUMNS;
        if (!group.together || team_->size() == 1) {
            gemm(l, x, count, 0, blocks, to, after ? after->weights : nullptr);
            return;
        }
        ThreadScratch& scratch = scratch_[group.thread];
        Counter& next = claims_[scratch.product % CLAIMS];
        if (group.thread == 0) claims_[(scratch.product + 2) % CLAIMS].n.store(team_->size(), std::memory_order_relaxed);
        ++scratch.product;
        const int some = grain(l);
        for (int a = group.thread * some; a < blocks;) {
            const int b = next.n.fetch_add(1, std::memory_order_relaxed) * some;
            const uint8_t* ahead = nullptr;
            if (b < blocks) ahead = l.weights + b * block_bytes(l);
            else if (after) ahead = after->weights + group.thread * grain(*after) * block_bytes(*after);
            gemm(l, x, count, a, std::min(a + some, blocks), to, ahead);
            a = b;
        }
        group.meet();
    }

    int grain(const Linear& l) const {
        return std::max(1, l.outputs / COLUMNS / ((rows_.count <= STREAMED ? 1 : GRAINS) * team_->size()));
    }

    // The rows of a layer between its mixer and its end: its input [rows, W], the mixed values, and which row of the step
    // each is; null: row i is row i.
    struct LayerRows {
        float* x;
        const float* mixed;
        const int32_t* numbers;
    };

    // The first part of a layer, in which rows are independent: what its mixer reads of rows [a, b).
    void project_input(const ThreadGroup& group, int l, int a, int b) {
        const Layer& layer = plan_.layers[l];
        float* row = scratch_[group.thread].row.get();
        const Operand x = prepare_rows(group, layer.input, adapter_updates(l, INPUT, row_adapters_, a), b - a, true, [&](int r) {
            const float* values = x_ + size_t(a + r) * width_;
            if (!norms_before(layer) || !layer.attention_norm.weight) return values;
            norm(layer.attention_norm, values, row);
            return (const float*)row;
        });
        product(group, layer.input, x, b - a, {projections_ + size_t(a) * projected_, projected_, STORE, 0}, &layer.output);
        const auto [from, to] = group.share(b - a);
        const int inner = columns_[l].inner;
        for (int r = from; r < to; ++r) {
            float* mixed = attn_ + size_t(a + r) * attended_;
            std::fill(mixed + inner, mixed + layer.output.inputs, 0.f);  // another layer's values may be there
            if (layer.mixer != ATTENTION) continue;
            if (plan_.narrow) store_keys_values<Codes>(l, a + r);
            else store_keys_values<float>(l, a + r);
        }
    }

    // The second part of a layer, in which the rows of a sequence depend on each other: mixed values to `attn_`.
    // Returns on all threads: whether all are computed.
    bool mix_rows(int thread, int l) {
        const int mixer = plan_.layers[l].mixer;
        if (mixer == NO_MIXER) return true;
        if (mixer == ATTENTION) return plan_.narrow ? attend<Codes>(thread, l) : attend<float>(thread, l);
        convolve_rows(thread, l);
        team_->wait();
        if (!shapes_[mixer].tiles) return true;
        scan_rows(thread, l);
        team_->wait();
        return true;
    }

    // The convolutions of all rows, and the numbers that decays follow from.  Pieces are runs of channels of a row.
    void convolve_rows(int thread, int l) {
        const Layer& layer = plan_.layers[l];
        const MixerShape& shape = shapes_[layer.mixer];
        const Recurrence& r = plan_.recurrence;
        const int runs = int(shape.runs.size()), pieces = runs + (shape.tiles ? 1 : 0);
        const int64_t all = int64_t(rows_.count) * pieces, end = all * (thread + 1) / team_->size();
        for (int64_t i = all * thread / team_->size(); i < end;) {
            const int row = int(i / pieces), first = int(i % pieces), n = sequence_of_[row], start = rows_.starts[n];
            const float* projected = projections_ + size_t(row) * projected_;
            const StateUse* use = plan_.state_count ? rows_.uses + n : nullptr;
            const float* past = use && use->read >= 0 ? state_at(use->read, l) : nullptr;
            const ConvolutionInput in{projected, size_t(projected_), row - start + 1, past, r.kernel, shape.channels,
                                      layer.mixer == CONVOLUTION ? 2 * plan_.width : 0};
            const bool is_last = row == rows_.starts[n + 1] - 1, is_border = use && row - start + 1 == use->border_rows;
            const int last = int(std::min<int64_t>(pieces, first + end - i));
            for (int p = first; p < last; ++p) {
                if (p == runs) {
                    float* steps = steps_ + size_t(row) * 2 * step_stride_;
                    compute_steps(layer.mixer, r, layer.recurrent, projected + shape.steps, steps, steps + step_stride_);
                    continue;
                }
                const Channels& run = shape.runs[p];
                if (layer.mixer == CONVOLUTION)
                    convolve_gated(in, run, layer.recurrent, projected + plan_.width + run.from,
                                   attn_ + size_t(row) * attended_ + run.to);
                else
                    convolve_heads(in, run, layer.recurrent, convolved_ + size_t(row) * channels_ + run.to);
                if (is_border) keep_inputs(in, run, state_at(use->border, l));
                if (use && is_last && !keep_inputs(in, run, state_at(use->write, l)) && l == last_recurrent_) report_rows(n);
            }
            i += last - first;
        }
    }

    // Every tile of a head's state through the rows of its sequence.
    void scan_rows(int thread, int l) {
        const int tiles = shapes_[plan_.layers[l].mixer].tiles, items = rows_.sequences * tiles;
        const int some = std::max(1, items / (GRAINS * team_->size()));
        Counter& next = counters_[COUNTERS * l + TILES];
        for (int a; (a = next.n.fetch_add(1, std::memory_order_relaxed) * some) < items;)
            for (int i = a; i < std::min(items, a + some); ++i) scan_state(thread, l, i / tiles, i % tiles);
        complete_stores();
    }

    void scan_state(int thread, int l, int n, int tile) {
        const Layer& layer = plan_.layers[l];
        const MixerShape& shape = shapes_[layer.mixer];
        const Recurrence& r = plan_.recurrence;
        const int of_head = shape.tiles / r.heads, head = tile / of_head, column = tile % of_head * TILE;
        const int key_head = head / (r.heads / r.key_heads), start = rows_.starts[n];
        const float* channels = convolved_ + size_t(start) * channels_;
        const float* steps = steps_ + size_t(start) * 2 * step_stride_ + head;
        const StateUse* use = plan_.state_count ? rows_.uses + n : nullptr;
        const size_t at = size_t(r.kernel - 1) * shape.channels + tile * tile_numbers();
        const int key = key_head * MixerShape::padded_head(r.key_width);
        Scan scan;
        scan.values = channels + shape.values + tile * TILE;
        scan.keys = channels + shape.keys + key;
        scan.queries = channels + shape.queries + key;
        scan.stride = channels_;
        scan.decays = steps;
        scan.updates = steps + step_stride_;
        scan.step_stride = 2 * step_stride_;
        scan.skip = layer.recurrent.skip ? layer.recurrent.skip[head] : 0.f;
        scan.out = attn_ + size_t(start) * attended_ + head * r.head_width + column;
        scan.out_stride = attended_;
        scan.width = std::min(TILE, r.head_width - column);
        scan.from = use && use->read >= 0 ? state_at(use->read, l) + at : no_state_.data();
        scan.to = use ? state_at(use->write, l) + at : scratch_[thread].state.get();
        scan.border_rows = use ? use->border_rows : 0;
        scan.border = scan.border_rows ? state_at(use->border, l) + at : nullptr;
        scan.rows = rows_.starts[n + 1] - start;
        scan.key_width = r.key_width;
        scan.past_cache = use && past_cache_;
        scan_tile(layer.mixer, scan);
        if (use && l == last_recurrent_ && !is_finite(scan.to, tile_numbers())) report_rows(n);
    }

    // The state of a recurrent layer in a slot.
    float* state_at(int slot, int layer) const { return slots_ + slot * state_numbers_ + places_[layer]; }

    // Reports the rows of a sequence whose state is not finite; several threads may.
    void report_rows(int n) {
        for (int row = rows_.starts[n]; row < rows_.starts[n + 1]; ++row)
            __atomic_store_n(nonfinite_ + row, 1, __ATOMIC_RELAXED);
    }

    // The mixed values of a row as the output product reads them, `row` of the step: gated and normed if the layer does so.
    const float* mixed_values(int l, const float* mixed, int row, float* out) const {
        const Layer& layer = plan_.layers[l];
        const MixerShape& shape = shapes_[layer.mixer];
        const auto [inner, before_gate, values] = columns_[l];
        const float* projected = projections_ + size_t(row) * projected_;
        if (layer.gated) {
            for (int i = 0; i < inner; i += LANES)
                store(out + i, mul(load(mixed + i), logistic(load(projected + before_gate + i))));
        } else if (shape.gate >= 0) {
            gate_features(layer.mixer, plan_.recurrence, layer.recurrent.norm, mixed, projected + shape.gate, shape.inner, out);
        } else {
            return mixed;
        }
        std::fill(out + inner, out + layer.output.inputs, 0.f);
        return out;
    }

    // x [a, b) += the output product of the mixer.
    void add_mixed(const ThreadGroup& group, int l, const LayerRows& of, const RowAdapters& adapters, int a, int b) {
        const Layer& layer = plan_.layers[l];
        if (layer.mixer == NO_MIXER) return;
        float* row = scratch_[group.thread].row.get();
        const Operand in = prepare_rows(group, layer.output, adapter_updates(l, OUTPUT, adapters, a), b - a, true, [&](int r) {
            const int number = of.numbers ? of.numbers[a + r] : a + r;
            return mixed_values(l, of.mixed + size_t(a + r) * attended_, number, row);
        });
        const Linear* after = layer.mixture ? &layer.mixture->router : &layer.up;
        add_product(group, l, layer.output, in, b - a, of.x + size_t(a) * width_, layer.attention_norm,
                    layer.attention_post_norm, layer.order == PARALLEL ? nullptr : after);
    }

    // The part of a layer after its rows were mixed.
    void finish_layer(const ThreadGroup& group, int l, const LayerRows& of, const RowAdapters& adapters, int a, int b) {
        const Layer& layer = plan_.layers[l];
        const int count = b - a;
        ThreadScratch& scratch = scratch_[group.thread];
        float* row = scratch.row.get();
        float* rows = of.x + size_t(a) * width_;
        auto at = [&](int r) { return rows + size_t(r) * width_; };
        const bool parallel = layer.order == PARALLEL;  // the MLP comes first, while the rows are the layer's input
        auto add_mlp = [&] {
            if (!layer.up.weights) return;
            float* hidden = scratch_[group.together ? 0 : group.thread].hidden.get();
            const int written = layer.up.outputs / (plan_.gated ? 2 : 1);
            const auto [from, to_row] = group.share(count);
            for (int r = from; r < to_row && written < layer.down.inputs; ++r)  // a wider layer's features may be there
                std::fill(hidden + size_t(r) * hidden_ + written, hidden + size_t(r) * hidden_ + layer.down.inputs, 0.f);
            Operand in = prepare_rows(group, layer.up, adapter_updates(l, UP, adapters, a), count, true, [&](int r) {
                if (!norms_before(layer)) return (const float*)at(r);
                norm(layer.mlp_norm, at(r), row);
                return (const float*)row;
            });
            const Target to{hidden, hidden_, plan_.gated ? GATE : ACTIVATE, plan_.activation};
            product(group, layer.up, in, count, to, &layer.down);
            in = prepare_rows(group, layer.down, adapter_updates(l, DOWN, adapters, a), count, true,
                              [&](int r) { return hidden + size_t(r) * hidden_; });
            add_product(group, l, layer.down, in, count, rows, layer.mlp_norm, layer.mlp_post_norm,
                        parallel ? &layer.output : nullptr);
        };
        if (parallel) add_mlp();
        add_mixed(group, l, of, adapters, a, b);
        if (!parallel) add_mlp();
        close_layer(group, l, of, a, b);
    }

    // x [a, b) after its MLP or experts: the layer's embeddings are added, and the sum is scaled.
    void close_layer(const ThreadGroup& group, int l, const LayerRows& of, int a, int b) {
        const Layer& layer = plan_.layers[l];
        if (layer.input_gate.weights) add_layer_input(group, l, of, a, b);
        if (layer.output_scale == 1.f) return;
        const auto [from, to_row] = group.share(b - a);
        for (int r = a + from; r < a + to_row; ++r) {
            float* x = of.x + size_t(r) * width_;
            for (int i = 0; i < width_; i += LANES) store(x + i, mul(load(x + i), all(layer.output_scale)));
        }
        group.meet();
    }

    // x [a, b) += the layer's embeddings of the rows, times a gate.
    void add_layer_input(const ThreadGroup& group, int l, const LayerRows& of, int a, int b) {
        const Layer& layer = plan_.layers[l];
        const int each = plan_.layer_embedding, count = b - a;
        float* rows = of.x + size_t(a) * width_;
        float* row = scratch_[group.thread].row.get();
        float* hidden = scratch_[group.together ? 0 : group.thread].hidden.get();
        Operand in = prepare_rows(group, layer.input_gate, {nullptr, 0}, count, true,
                                  [&](int r) { return (const float*)rows + size_t(r) * width_; });
        product(group, layer.input_gate, in, count, {hidden, hidden_, ACTIVATE, plan_.activation}, &layer.input_up);
        in = prepare_rows(group, layer.input_up, {nullptr, 0}, count, true, [&](int r) {
            const size_t number = of.numbers ? of.numbers[a + r] : a + r;
            const float* own = layer_inputs_ + number * plan_.layer_projection.outputs + l * each;
            for (int i = 0; i < each; ++i) row[i] = hidden[size_t(r) * hidden_ + i] * own[i];
            std::fill(row + each, row + layer.input_up.inputs, 0.f);
            return (const float*)row;
        });
        add_product(group, l, layer.input_up, in, count, rows, layer.input_norm, layer.input_norm, nullptr);
    }

    // As finish_layer, for all `count` rows of a layer with experts, on all threads.  All rows are ready when this returns.
    void finish_mixed_layer(int thread, int l, const LayerRows& of, const RowAdapters& adapters, int count) {
        const Layer& layer = plan_.layers[l];
        const bool parallel = layer.order == PARALLEL;  // as in finish_layer
        each_panel(thread, count, counters_[COUNTERS * l + SCORED], [&](const ThreadGroup& group, int a, int b) {
            if (!parallel) add_mixed(group, l, of, adapters, a, b);
            multiply_router(group, l, of.x, a, b, count);
        });
        choose_rows_experts(thread, l, count);
        for (int a = 0; a < count; a += SLAB) add_experts(thread, l, of.x, a, std::min(count, a + SLAB), count);
        if (!parallel && !layer.input_gate.weights && layer.output_scale == 1.f) return;
        each_panel(thread, count, counters_[COUNTERS * l + ATTENDED], [&](const ThreadGroup& group, int a, int b) {
            if (parallel) add_mixed(group, l, of, adapters, a, b);
            close_layer(group, l, of, a, b);
        });
    }

    // The inputs [count, width] of the experts, and the choices [count, each] of experts: this thread's own if the rows
    // are few.
    float* normed_rows(int thread, int count) { return count <= FEW ? scratch_[thread].normed.get() : normed_; }
    Choice* choices_of(int thread, int count) { return count <= FEW ? scratch_[thread].choices.get() : choices_; }

    // The inputs of the experts for rows [a, b) of `count`, and the router's outputs.
    void multiply_router(const ThreadGroup& group, int l, const float* x, int a, int b, int count) {
        const Layer& layer = plan_.layers[l];
        const Linear& router = layer.mixture->router;
        float* normed = normed_rows(group.thread, count);
        const Operand in = prepare_rows(group, router, {nullptr, 0}, b - a, true, [&](int r) {
            const float* values = x + size_t(a + r) * width_;
            float* out = normed + size_t(a + r) * width_;
            if (norms_before(layer)) norm(layer.mlp_norm, values, out);
            else memcpy(out, values, size_t(width_) * sizeof(float));
            return out;
        });
        product(group, router, in, b - a, {logits_ + size_t(a) * scored_, scored_, STORE, 0},
                &layer.mixture->experts[0].up);
    }

    void choose_rows_experts(int thread, int l, int count) {
        const bool few = count <= FEW;
        const auto [a, b] = few ? std::pair(0, count) : part(count, thread, team_->size());
        Choice* choices = choices_of(thread, count);
        for (int row = a; row < b; ++row)
            choose_experts(plan_.routing, *plan_.layers[l].mixture, logits_ + size_t(row) * scored_,
                           scratch_[thread].routing, choices + size_t(row) * each_);
        if (!few) team_->wait();
    }

    // All threads together compute `count` pieces: each its own first one, then the next free ones.  f(i, next): piece i,
    // and the piece that this thread computes after it, which may be `count` or more.
    template <class F>
    void share_pieces(int thread, int count, F&& f) {
        ThreadScratch& scratch = scratch_[thread];
        Counter& next = claims_[scratch.product % CLAIMS];
        if (thread == 0) claims_[(scratch.product + 2) % CLAIMS].n.store(team_->size(), std::memory_order_relaxed);
        ++scratch.product;
        for (int i = thread; i < count;) {
            const int after = next.n.fetch_add(1, std::memory_order_relaxed);
            f(i, after);
            i = after;
        }
        team_->wait();
    }

    // x rows [from, to) of `count` += the sum of their experts' outputs, with the norms of the layer's norm order.  A row's
    // experts are added in the order of their numbers, so its sum does not depend on other rows.
    void add_experts(int thread, int l, float* x, int from, int to, int count) {
        const Layer& layer = plan_.layers[l];
        const Mixture& mixture = *layer.mixture;
        const Expert* all = mixture.experts;
        RowsByExpert& sorted = scratch_[thread].sorted;
        sorted.sort(choices_of(thread, count) + size_t(from) * each_, to - from, each_, all,
                    plan_.routing.count + plan_.routing.shared);
        multiply_up(thread, mixture, normed_rows(thread, count) + size_t(from) * width_);
        const Operand inner = prepare_inner(thread, all);
        float* rows = x + size_t(from) * width_;
        multiply_down(thread, mixture, inner, norms_apart(layer) ? nullptr : rows, to - from);
        if (mixture.norms_parts()) add_normed_parts({*this, thread, true}, mixture, to - from);
        if (is_normed_after(layer)) normalise_sum({*this, thread, true}, l, rows, mixed_, to - from, layer.mlp_norm, layer.mlp_post_norm);
    }

    // The sums [count] in `mixed_`: the norm of the chosen experts' sum, and that of the shared expert's output behind it.
    // A thread has the same rows as in normalise_sum, which comes next.
    void add_normed_parts(const ThreadGroup& group, const Mixture& mixture, int count) {
        const auto [from, to_row] = group.share(count);
        for (int r = from; r < to_row; ++r) {
            float *chosen = mixed_ + size_t(r) * width_, *shared = mixed_ + size_t(count + r) * width_;
            std::fill(chosen + plan_.width, chosen + width_, 0.f);  // a NaN row has made its padding NaN
            std::fill(shared + plan_.width, shared + width_, 0.f);
            norm(mixture.chosen_norm, chosen, chosen);
            norm(mixture.shared_norm, shared, shared);
            for (int i = 0; i < width_; i += LANES) store(chosen + i, add(load(chosen + i), load(shared + i)));
        }
    }

    // The first products of all experts; the inner features of their rows are written to `inner_x_`.
    void multiply_up(int thread, const Mixture& mixture, const float* normed) {
        ThreadScratch& scratch = scratch_[thread];
        const Expert* all = mixture.experts;
        const RowsByExpert& sorted = scratch.sorted;
        const std::vector<ExpertPiece>& pieces = cut_up(scratch, all);
        const Routing& r = plan_.routing;
        int row = -1, first = -1, rows = 0, format = -1;  // which rows are prepared
        const float* weights = nullptr;                   // and by what they are multiplied
        const auto weighted = [&](int number) {
            const float* from = normed + size_t(number) * width_;
            if (!weights) return from;
            float* out = scratch.row.get();
            for (int i = 0; i < width_; i += LANES) store(out + i, mul(load(from + i), load(weights + i)));
            return (const float*)out;
        };
        share_pieces(thread, int(pieces.size()), [&](int i, int next) {
            const ExpertPiece& piece = pieces[i];
            const ExpertRows& mine = sorted.experts[piece.expert];
            const Linear& up = all[mine.expert].up;
            const Operand x = operand(thread, up.inputs);
            const ExpertRow* members = sorted.rows.data() + piece.first;
            const float* own = mixture.input_of(mine.expert == r.count);
            const bool same = rows == 1 ? row == members->row : first == piece.first;
            const bool ready = format == up.format && weights == own && rows == piece.count && same;
            weights = own;
            if (!ready)
                for (int n = 0; n < piece.count; ++n) prepare(x, up.format, n, weighted(members[n].row));
            row = members->row, first = piece.first, rows = piece.count, format = up.format;
            const bool clamped = r.clamp && mine.expert < r.count;
            float* out = inner_x_.floats + mine.offset + size_t(piece.first - mine.first) * mine.inputs;
            const Target to{out, mine.inputs, plan_.gated ? GATE : ACTIVATE, clamped ? CLAMPED : plan_.activation, 1.f, r.clamp};
            const uint8_t* ahead = nullptr;
            if (next < int(pieces.size())) {
                const Linear& other = all[sorted.experts[pieces[next].expert].expert].up;
                ahead = other.weights + pieces[next].from * block_bytes(other);
            }
            gemm(up, x, piece.count, piece.from, piece.to, to, ahead);
            const int written = up.outputs / (plan_.gated ? 2 : 1);
            if (piece.to == up.outputs / COLUMNS)  // the padding of another expert's rows may be there
                for (int n = 0; n < piece.count; ++n)
                    std::fill(out + size_t(n) * mine.inputs + written, out + size_t(n + 1) * mine.inputs, 0.f);
        });
    }

    // Cuts the first products of all experts to pieces that take about as long as each other.
    const std::vector<ExpertPiece>& cut_up(ThreadScratch& scratch, const Expert* all) const {
        const auto cost = [](int blocks, int rows) { return int64_t(blocks) * std::max(rows, READING); };
        int64_t total = 0;
        for (const ExpertRows& each : scratch.sorted.experts)
            total += cost(all[each.expert].up.outputs / COLUMNS, each.count);
        const int64_t most = std::max<int64_t>(1, total / (GRAINS * team_->size()));
        scratch.pieces.clear();
        for (int e = 0; e < int(scratch.sorted.experts.size()); ++e) {
            const ExpertRows& each = scratch.sorted.experts[e];
            const int blocks = all[each.expert].up.outputs / COLUMNS;
            for (int done = 0; done < each.count; done += PANEL) {
                const int rows = std::min(PANEL, each.count - done);
                const int parts = int(std::clamp<int64_t>((cost(blocks, rows) + most - 1) / most, 1, blocks));
                for (int i = 0; i < parts; ++i) {
                    const auto [from, to] = part(blocks, i, parts);
                    scratch.pieces.push_back({e, each.first + done, rows, from, to});
                }
            }
        }
        return scratch.pieces;
    }

    // The inner features of all experts' rows as operands of the second products; ExpertRows says where each begins.
    Operand prepare_inner(int thread, const Expert* all) {
        const RowsByExpert& sorted = scratch_[thread].sorted;
        const int count = int(sorted.rows.size());
        const bool alone = count <= FEW_OF_EXPERTS;
        Operand out = alone ? operand(thread, 0) : inner_x_;
        out.floats = inner_x_.floats;
        const auto [a, b] = alone ? std::pair(0, count) : part(count, thread, team_->size());
        for (const ExpertRows& each : sorted.experts) {
            const int format = all[each.expert].down.format;
            if (format == FLOAT32) continue;  // they are its operand as they are
            const Operand x = operand_at(out, each, format, 0);
            for (int i = std::max(a, each.first); i < std::min(b, each.first + each.count); ++i)
                prepare(x, format, i - each.first, x.floats + size_t(i - each.first) * each.inputs);
        }
        if (!alone) team_->wait();
        return out;
    }

    // The rows of an expert from its row `first` on, for a product in `format`.
    static Operand operand_at(const Operand& x, const ExpertRows& each, int format, int first) {
        const size_t before = size_t(first) * each.inputs, at = each.offset + before;
        return {x.floats + at, x.codes + at, x.scales + each.offset / SPAN + before / span_inputs(format),
                x.offsets + each.offset / GROUP + before / group_inputs(format), each.inputs};
    }

    // The second products of all experts and the sums of each row [count] in `mixed_`, which are added to `rows` unless it is
    // null.  A piece is a range of columns.  Where its norm is its own, the shared expert's output is behind the sums.
    void multiply_down(int thread, const Mixture& mixture, const Operand& inner, float* rows, int count) {
        ThreadScratch& scratch = scratch_[thread];
        const Expert* all = mixture.experts;
        const RowsByExpert& sorted = scratch.sorted;
        const int blocks = all[0].down.outputs / COLUMNS;
        const int pieces = std::min(blocks, (count <= STREAMED ? 2 : GRAINS) * team_->size());
        float* product = scratch.sandwich.get();
        share_pieces(thread, pieces, [&](int i, int) {
            const auto [from, to] = part(blocks, i, pieces);
            const int a = from * COLUMNS, b = to * COLUMNS;
            const int sums = mixture.norms_parts() ? 2 * count : count;
            for (int row = 0; row < sums; ++row) std::fill(mixed_ + size_t(row) * width_ + a, mixed_ + size_t(row) * width_ + b, 0.f);
            for (size_t e = 0; e < sorted.experts.size(); ++e) {
                const ExpertRows& each = sorted.experts[e];
                const Linear& down = all[each.expert].down;
                float* sum = mixed_ + (mixture.norms_parts() && each.expert == plan_.routing.count ? size_t(count) * width_ : 0);
                const uint8_t* ahead = nullptr;
                if (e + 1 < sorted.experts.size()) {
                    const Linear& other = all[sorted.experts[e + 1].expert].down;
                    ahead = other.weights + from * block_bytes(other);
                }
                for (int done = 0; done < each.count; done += PANEL) {
                    const int some = std::min(PANEL, each.count - done);
                    gemm(down, operand_at(inner, each, down.format, done), some, from, to, {product, width_, STORE, 0}, ahead);
                    for (int r = 0; r < some; ++r) {
                        const ExpertRow& member = sorted.rows[each.first + done + r];
                        add_columns(sum + size_t(member.row) * width_, product + size_t(r) * width_, member.weight, a, b);
                    }
                }
            }
            if (!rows) return;
            for (int row = 0; row < count; ++row)
                add_columns(rows + size_t(row) * width_, mixed_ + size_t(row) * width_, plan_.residual_scale, a, b);
        });
    }

    // Columns [a, b) of a row += scale * values.
    static void add_columns(float* row, const float* values, float scale, int a, int b) {
        for (int i = a; i < b; i += LANES) store(row + i, add(load(row + i), mul(load(values + i), all(scale))));
    }

    // Whether the input of a part is normed, in layers that have such a norm.
    static bool norms_before(const Layer& layer) { return layer.order != POST && layer.order != INNER; }
    // Whether a part's output is normed before the sum.
    static bool norms_apart(const Layer& layer) { return layer.order == SANDWICH || layer.order == INNER; }
    // Whether a part's output, or its sum with the part's input, is normed.
    static bool is_normed_after(const Layer& layer) { return norms_apart(layer) || layer.order == POST; }

    // Copies rows [a, b) of `x`, the output of a layer, to `states`; `which` are their row numbers, null: a..b.
    void copy_states(const ThreadGroup& group, int l, const float* x, const int32_t* which, int a, int b) {
        const size_t width = size_t(plan_.width);
        const auto [from, to] = group.share(b - a);
        for (int i = a + from; i < a + to; ++i) {
            const size_t row = size_t(l) * rows_.count + (which ? which[i] : i);
            memcpy(rows_.states + row * width, x + size_t(i) * width_, width * sizeof(float));
        }
    }

    // rows += product, with the norms of the layer's norm order: `norm_of_part`, which is before the part, after the sum
    // or before the sum, and `post_norm`, before the sum.
    void add_product(const ThreadGroup& group, int l, const Linear& linear, const Operand& in, int count, float* rows,
                     const Norm& norm_of_part, const Norm& post_norm, const Linear* after) {
        const bool apart = norms_apart(plan_.layers[l]);
        float* sandwich = scratch_[group.together ? 0 : group.thread].sandwich.get();
        const Target to{apart ? sandwich : rows, width_, apart ? STORE : ADD, 0, plan_.residual_scale};
        product(group, linear, in, count, to, after);
        if (is_normed_after(plan_.layers[l])) normalise_sum(group, l, rows, sandwich, count, norm_of_part, post_norm);
    }

    // Norms the rows after a part: the sums in `rows`, or the part's outputs [count, width], which are then added to them.
    // The norms are as in add_product.
    void normalise_sum(const ThreadGroup& group, int l, float* rows, float* outputs, int count, const Norm& norm_of_part,
                       const Norm& post_norm) {
        const Order order = Order(plan_.layers[l].order);
        const bool apart = order != POST;
        const Norm& before_sum = order == SANDWICH ? post_norm : norm_of_part;
        const Floats scale = all(plan_.residual_scale);
        const auto [from, to_row] = group.share(count);
        for (int r = from; r < to_row; ++r) {
            float* x = rows + size_t(r) * width_;
            if (!apart) { norm(norm_of_part, x, x); continue; }
            float* y = outputs + size_t(r) * width_;
            std::fill(y + plan_.width, y + width_, 0.f);  // a NaN row has made its padding NaN
            norm(before_sum, y, y);
            for (int i = 0; i < width_; i += LANES) store(x + i, fma(load(y + i), scale, load(x + i)));
        }
        group.meet();
    }

    // Whether the keys that a layer reads are in blocks that are not those of other layers.
    bool has_own_blocks(int l) const {
        const Layer& layer = plan_.layers[l];
        return plan_.window_blocks && layer.mixer == ATTENTION && plan_.layers[layer.key_layer].window;
    }
    // The number of the block that holds tokens [index * BLOCK, (index + 1) * BLOCK) of sequence n in a layer.
    int block_of(int l, int n, int index) const {
        if (!own_blocks_[l]) return rows_.block_tables[rows_.table_starts[n] + index];
        const int last = rows_.positions[rows_.starts[n + 1] - 1] / BLOCK;
        return rows_.window_tables[rows_.window_starts[n + 1] - 1 - (last - index)];
    }
    // The keys (0) or values (1) of a head in a block.  The blocks of windowed layers come last.
    uint8_t* kept_at(int which, int l, int block, int head) const {
        const HeadShape& shape = shape_of(l);
        const bool own = own_blocks_[l];
        const size_t run = plan_.block_count ? RUN : local_tables_.size(), b = size_t(own ? block - plan_.block_count : block);
        const size_t first = plan_.block_count ? b / RUN : 0, in_run = plan_.block_count ? b % RUN : b;
        const size_t at = (first * block_bytes_[own][which] + kept_places_[which][l]) * run + (own ? own_start_[which] : 0);
        return kept_[which] + at + (in_run * shape.kv_heads + head) * shape.bytes[which];
    }
    template <class T>
    T* keys_at(int l, int block, int head) const { return reinterpret_cast<T*>(kept_at(0, l, block, head)); }
    template <class T>
    T* values_at(int l, int block, int head) const { return reinterpret_cast<T*>(kept_at(1, l, block, head)); }

    // In place: queries or keys [heads, D] of a row.
    void norm_heads(const Norm& norm, float* x, int heads, int head_width) const {
        if (!norm.weight) return;
        const Plan& p = plan_;
        const bool joint = p.head_norms == JOINT;
        const int count = joint ? 1 : heads, width = joint ? heads * head_width : head_width;
        for (int h = 0; h < count; ++h) {
            const int at = p.head_norms == PER_HEAD ? h * width : 0;
            const float* bias = norm.bias ? norm.bias + at : nullptr;
            normalise_features(NormKind(p.norm), norm.weight + at, bias, p.eps, x + h * width, width);
        }
    }

    // Norms and rotates a row's queries and keys, and stores keys and values in the cache.
    template <class T>
    void store_keys_values(int l, int row) {
        const Plan& p = plan_;
        const Layer& layer = p.layers[l];
        const HeadShape& shape = shape_of(l);
        const bool own = layer.key_layer == l;
        const int d = shape.width, kept = own ? shape.kv_heads : 0, position = rows_.positions[row], n = sequence_of_[row];
        float* q = projections_ + size_t(row) * projected_;
        const int asking = projected_heads();
        float* k = q + asking * d;
        float* v = q + columns_[l].values;
        const float* angle = layer.frequencies ? rotation(row, kind_of(layer)) : nullptr;
        if (own && layer.tied_values) std::copy(k, k + kept * d, v);
        norm_heads(layer.query_norm, q, asking, d);
        if (own) norm_heads(layer.key_norm, k, kept, d);
        for (int h = 0; h < kept && layer.value_norm.weight; ++h)
            normalise_features(RMS_NORM, layer.value_norm.weight, nullptr, p.eps, v + h * d, d);
        if (angle)
            for (int h = 0; h < asking + kept; ++h)
                rotate(q + h * d, angle, angle + layer.rotary_width / 2, layer.rotary_width);
        const int block = block_of(l, n, position / BLOCK);
        for (int h = 0; h < kept; ++h)
            store_head(keys_at<T>(l, block, h), values_at<T>(l, block, h), position % BLOCK, k + h * d, v + h * d, d, shape.head);
        if (l == last_kept_) {  // NaN in an earlier layer reaches the last one
            float s = 0;
            for (int i = 0; i < kept * d; ++i) s += k[i] * 0.f + v[i] * 0.f;
            if (s != 0.f) nonfinite_[row] = 1;
        }
    }

    template <class T>
    bool attend(int thread, int l) {
        const HeadShape& shape = shape_of(l);
        const int tiles = shape.items(), of_tile = shape.split_parts ? parts_ : 1, items = tiles * of_tile;
        Counter& next = counters_[COUNTERS * l + TILES];
        for (int i; (i = next.n.fetch_add(1, std::memory_order_relaxed)) < items;) {
            if (const int later = i + team_->size(); later < items) prefetch_queries(l, later / of_tile);
            attend_tile<T>(thread, l, i / of_tile, shape.split_parts ? i % of_tile : -1);
            if (is_turn_over()) break;
        }
        team_->wait();
        if (next.n.load(std::memory_order_relaxed) < items) return false;
        if (!shape.split_parts) return true;
        const auto [a, b] = part(tiles, thread, team_->size());
        for (int i = a; i < b; ++i) merge_parts(thread, l, i);
        team_->wait();
        return true;
    }

    // The queries of a tile, which this thread probably computes next.
    void prefetch_queries(int l, int item) const {
        const HeadShape& shape = shape_of(l);
        const AttentionTile& tile = shape.tiles[item / shape.per_tile()];
        const int heads = shape.group / shape.splits;
        const int first = item % shape.per_tile() / shape.splits * shape.group + item % shape.splits * heads;
        for (int r = 0; r < tile.count; ++r) {
            const float* queries = projections_ + size_t(tile.row + r) * projected_ + first * shape.width;
            for (int i = 0; i < heads * shape.width; i += 16) prefetch(queries + i);
        }
    }

    // One tile: all its parts and the mixed values, or one part (`only`) to `partial_`.
    template <class T>
    void attend_tile(int thread, int l, int item, int only) {
        const Plan& p = plan_;
        const Layer& layer = p.layers[l];
        const HeadShape& shape = shape_of(l);
        const AttentionTile& tile = shape.tiles[item / shape.per_tile()];
        const int heads = shape.group / shape.splits, kv = item % shape.per_tile() / shape.splits, head_ = shape.head;
        const int first = kv * shape.group + item % shape.splits * heads, queries = tile.count * heads, d = shape.width;
        ThreadScratch& scratch = scratch_[thread];
        ScoreChange change;
        const bool changes = p.score_cap || p.rates;
        change.cap = p.score_cap * EXPONENT;
        change.by_distance = p.rates != nullptr;
        const Queries q{scratch.queries.get(), scratch.query_codes.get(), scratch.query_scales.get(), head_,
                        changes ? &change : nullptr};
        const float scale = layer.score_scale * EXPONENT;
        KeyRange<T> range, apart;  // apart: global tokens that the range does not reach
        const int length = rows_.positions[rows_.starts[tile.sequence + 1] - 1] + 1;
        const auto [global, global_end] = global_[tile.sequence];
        int low = length, high = 0, apart_low = length, apart_high = 0;
        for (int r = 0; r < queries; ++r) {
            const int row = tile.row + r / heads, position = rows_.positions[row];
            const int64_t window = layer.window;  // a sum with a position may need 32 bits
            const float* from = projections_ + size_t(row) * projected_ + (first + r % heads) * d;
            float* query = q.floats + r * head_;
            for (int i = 0; i < d; ++i) query[i] = from[i] * scale;
            std::fill(query + d, query + head_, 0.f);
            if (p.narrow) prepare_query(q, r);
            if (changes) {
                change.positions[r] = position;
                change.rates[r] = p.rates ? p.rates[first + r % heads] * EXPONENT : 0.f;
            }
            range.to[r] = p.causal ? position + 1 : window ? int(std::min<int64_t>(length, position + window)) : length;
            range.from[r] = window ? int(std::max<int64_t>(0, position - window + 1)) : 0;
            apart.from[r] = apart.to[r] = 0;
            if (!is_mixed(row, first)) { range.from[r] = range.to[r] = 0; continue; }
            if (first >= p.heads) {
                range.from[r] = 0; range.to[r] = length;
            } else if (global <= range.to[r] && global_end >= range.from[r]) {
                range.from[r] = std::min(range.from[r], global);
                range.to[r] = std::max(range.to[r], global_end);
            } else if (global < global_end) {
                apart.from[r] = apart_low = global;
                apart.to[r] = apart_high = global_end;
            }
            low = std::min(low, range.from[r]);
            high = std::max(high, range.to[r]);
        }
        const int least = std::min(low, apart_low), most = std::max(high, apart_high), blocks = (most + BLOCK - 1) / BLOCK;
        const T** keys = (const T**)scratch.blocks.reserve(2 * size_t(blocks + AHEAD));
        const T** values = keys + blocks + AHEAD;
        // Those that are read: of all parts, or of one.  Each part for itself would find all those of a long context again.
        const int read = only < 0 ? blocks : std::min(blocks, (only + 1) * PART_BLOCKS);
        for (int b = std::max(least / BLOCK, only * PART_BLOCKS); b < read + AHEAD && least < most; ++b) {
            const int block = block_of(l, tile.sequence, std::min(b, blocks - 1));
            keys[b] = keys_at<T>(l, block, kv);
            values[b] = values_at<T>(l, block, kv);
        }
        range.keys = apart.keys = keys;
        range.values = apart.values = values;
        const auto attend_range = ATTEND_PART<T>.of[queries];
        const auto merge_rows = [&](Outcome* sums, float* to, const Outcome* others, const float* from) {
            for (int r = 0; r < queries; ++r) merge(sums[r], to + r * head_, others[r], from + r * head_, head_);
        };
        const auto overlaps = [](int part, int from, int to) { return part * PART < to && (part + 1) * PART > from; };
        float* mixed = scratch.mixed.get();
        float* more = mixed + size_t(MAX_QUERIES) * head_;
        float* separate = more + size_t(MAX_QUERIES) * head_;
        // One part, the tokens of the range before those apart from it.  Returns whether a query sees any token of the part.
        const auto attend_part = [&](int part, float* to, Outcome* outcomes) {
            const bool has_apart = overlaps(part, apart_low, apart_high);
            if (!has_apart && !overlaps(part, low, high)) return false;
            attend_range(q, range, part, scratch.scores.get(), to, outcomes);
            if (!has_apart) return true;
            Outcome others[MAX_QUERIES];
            attend_range(q, apart, part, scratch.scores.get(), separate, others);
            merge_rows(outcomes, to, others, separate);
            return true;
        };
        if (only >= 0) {
            const size_t at = (size_t(item) * parts_ + only) * MAX_QUERIES;
            if (!attend_part(only, partial_ + at * head_, &outcomes_[at]))
                std::fill_n(&outcomes_[at], queries, Outcome{-INFINITY, 0.f});
            return;
        }
        if (least >= most) return;  // the rows are mixed by other heads
        Outcome outcome[MAX_QUERIES], other[MAX_QUERIES];
        int i = least / PART;
        attend_part(i, mixed, outcome);
        for (++i; i * PART < most; ++i)
            if (attend_part(i, more, other)) merge_rows(outcome, mixed, other, more);
        write(l, tile, first, heads, mixed, outcome);
    }

    // Whether the heads from `first` on mix the values of a row: the second half those of global tokens, the first half the
    // others.
    bool is_mixed(int row, int first) const {
        const auto [global, end] = global_[sequence_of_[row]];
        const int position = rows_.positions[row];
        return (global <= position && position < end) == (first >= plan_.heads);
    }

    // Merges the parts of one tile, which were computed separately, in order.
    void merge_parts(int thread, int l, int item) {
        const HeadShape& shape = shape_of(l);
        const AttentionTile& tile = shape.tiles[item / shape.per_tile()];
        const int heads = shape.group / shape.splits, kv = item % shape.per_tile() / shape.splits, head_ = shape.head;
        const int first = kv * shape.group + item % shape.splits * heads;
        float* mixed = scratch_[thread].mixed.get();
        Outcome outcome[MAX_QUERIES];
        for (int r = 0; r < tile.count * heads; ++r) {
            bool begun = false;
            for (int i = 0; i < parts_; ++i) {
                const size_t at = (size_t(item) * parts_ + i) * MAX_QUERIES + r;
                if (outcomes_[at].most == -INFINITY && outcomes_[at].sum == 0.f) continue;
                if (begun) { merge(outcome[r], mixed + r * head_, outcomes_[at], partial_ + at * head_, head_); continue; }
                outcome[r] = outcomes_[at];
                memcpy(mixed + r * head_, partial_ + at * head_, size_t(head_) * sizeof(float));
                begun = true;
            }
        }
        write(l, tile, first, heads, mixed, outcome);
    }

    void write(int l, const AttentionTile& tile, int first, int heads, float* mixed, Outcome* outcome) {
        const int d = shape_of(l).width, head_ = shape_of(l).head;
        const float* sinks = plan_.layers[l].sinks;
        for (int r = 0; r < tile.count * heads; ++r) {
            const int row = tile.row + r / heads;
            if (!is_mixed(row, first)) continue;
            if (sinks) add_sink(outcome[r], mixed + r * head_, sinks[first + r % heads] * EXPONENT, d);
            float* out = attn_ + size_t(row) * attended_ + (first + r % heads) % plan_.heads * d;
            const float share = 1.f / outcome[r].sum;
            for (int i = 0; i < d; ++i) out[i] = mixed[r * head_ + i] * share;
        }
    }

    // After the last attention only the output rows are computed further.
    void select_output_rows(int thread) {
        const auto [a, b] = part(rows_.output_count, thread, team_->size());
        for (int i = a; i < b; ++i) {
            const size_t row = size_t(rows_.output_rows[i]);
            std::copy_n(x_ + row * width_, width_, last_x_ + size_t(i) * width_);
            std::copy_n(attn_ + row * attended_, attended_, last_attn_ + size_t(i) * attended_);  // none without a mixer
        }
        team_->wait();
    }

    void write_output(int thread) {
        const Plan& p = plan_;
        const ThreadGroup group{*this, thread, true};
        if (!p.generates) {
            const auto [a, b] = part(rows_.output_count, thread, team_->size());
            float* row = scratch_[thread].row.get();
            for (int i = a; i < b; ++i) {
                const float* x = last_x_ + size_t(i) * width_;
                if (p.final_norm.weight) { norm(p.final_norm, x, row); x = row; }
                memcpy(out_ + size_t(i) * out_stride_, x, size_t(p.width) * sizeof(float));
            }
            return;
        }
        for (int a = 0; a < rows_.output_count; a += PANEL) {
            const int count = std::min(PANEL, rows_.output_count - a);
            float* row = scratch_[thread].row.get();
            const Operand x = prepare_rows(group, p.head, {nullptr, 0}, count, true, [&](int r) {
                const float* values = last_x_ + size_t(a + r) * width_;
                if (!p.final_norm.weight) return values;
                norm(p.final_norm, values, row);
                return (const float*)row;
            });
            product(group, p.head, x, count, {out_ + size_t(a) * out_stride_, out_stride_, STORE, 0});
            if (p.logit_scale == 1.f && !p.logit_cap) continue;
            const auto [from, to] = part(p.head.outputs / COLUMNS, thread, team_->size());
            for (int r = a; r < a + count; ++r)
                scale_logits(out_ + size_t(r) * out_stride_ + from * COLUMNS, (to - from) * COLUMNS, p.logit_scale, p.logit_cap);
            team_->wait();
        }
        const auto [a, b] = part(rows_.output_count, thread, team_->size());
        for (int i = a; i < b; ++i) argmax_[i] = argmax(out_ + size_t(i) * out_stride_, p.vocab_size);
    }

    const Plan plan_;
    Team own_team_, lone_team_{1};
    Team* team_ = &own_team_;  // that computes
    std::vector<ThreadScratch> scratch_;
    std::vector<Counter> counters_;
    Counter claims_[CLAIMS];
    int width_, embedded_, hidden_, head_ = 0;  // padded; the head is the widest
    int attended_ = 0, projected_ = 0;      // strides of mixed values and of what mixers read, padded
    int channels_ = 0, step_stride_ = 0;    // strides of convolved channels, and of half of a row's steps
    MixerShape shapes_[NO_MIXER + 1];
    std::vector<HeadShape> head_shapes_;
    std::vector<int> shape_numbers_;       // of each layer
    std::vector<LayerColumns> columns_;    // of each layer
    std::vector<size_t> places_;           // of each layer: where its state begins in a slot
    std::vector<size_t> kept_places_[2];   // of each layer: bytes of keys and of values in a block before its own
    std::vector<uint8_t> own_blocks_;      // of each layer: has_own_blocks
    size_t block_bytes_[2][2] = {};        // of keys and of values in a block: of the other layers, and of windowed ones with their own
    size_t own_start_[2] = {};             // where the keys and the values of these begin
    size_t state_numbers_ = 0;    // of a slot
    int last_kept_ = -1, last_recurrent_ = -1;
    int64_t window_ = 0;  // the largest of layers that have their own blocks
    std::vector<float> no_state_;  // a tile of zeros
    enum SlotUse : uint8_t { UNUSED, READ, WRITTEN };
    std::vector<uint8_t> slot_uses_;  // in the step that is checked
    int max_inputs_;
    int each_ = 0, inner_ = 0, scored_ = 0;  // of a row: experts, their inner features (0: no experts), router's outputs
    bool norms_parts_ = false;               // whether a mixture does
    const float* frequencies_[KINDS] = {};
    float magnitudes_[KINDS] = {};
    int rotary_widths_[KINDS] = {};
    uint8_t* kept_[2] = {};  // keys and values
    float* slots_ = nullptr;
    bool past_cache_ = false;  // states may be written past the cache
    // The step in progress:
    struct WholeStep {
        StepInput rows;
        float* out;
        uint8_t* nonfinite;
        int32_t* argmax;
    };
    WholeStep whole_{};
    int next_sequence_ = 0;  // the first behind the portion that is computed
    std::vector<int32_t> portion_starts_, portion_outputs_;
    StepInput rows_;  // of the portion, as all that follows
    int stage_ = 0, planned_threads_ = 1;  // the next stage; for how many threads panels are cut
    bool has_turn_ = false;
    Clock::time_point turn_end_{};
    float *out_, *x_, *embeddings_, *projections_, *convolved_, *steps_, *attn_, *last_x_, *last_attn_, *rotations_, *partial_;
    int out_stride_, longest_, parts_;
    float* layer_inputs_ = nullptr;
    uint8_t* nonfinite_;
    int32_t* argmax_;
    float *normed_, *logits_, *mixed_;  // of rows in layers with experts
    Choice* choices_;
    Operand inner_x_;  // of all experts' rows
    Scratch<float> normed_scratch_, logits_scratch_, mixed_scratch_, inner_floats_, inner_scales_, inner_offsets_;
    Scratch<int8_t> inner_codes_;
    Scratch<Choice> choices_scratch_;
    Scratch<float> convolved_scratch_, steps_scratch_;
    Scratch<float> x_scratch_, projections_scratch_, attn_scratch_, last_x_scratch_, last_attn_scratch_, rotations_scratch_;
    Scratch<float> partial_scratch_, embeddings_scratch_;
    Scratch<float> layer_inputs_scratch_;
    Scratch<uint8_t> kept_scratch_[2];
    std::vector<Outcome> outcomes_;
    std::vector<int32_t> local_tables_, local_starts_, sequence_of_;
    std::vector<std::pair<int, int>> global_;  // of each sequence: find_global
    RowAdapters row_adapters_, last_row_adapters_;  // of each row, of each output row
};

// A step, and its result: what of `rows` is out of range, in which case nothing is computed; 0: it is finished;
// UNFINISHED: the turn is over, and polyhead_resume goes on.
struct StepCall {
    Model* model;
    const StepInput* rows;
    float* out;
    uint8_t* nonfinite;
    int32_t* argmax;
    int32_t out_stride, result;

    void begin(TurnEnd end, bool alone) {
        result = int(model->check(*rows, out_stride));
        if (result == int(Invalid::NONE) && !model->step(*rows, out, out_stride, nonfinite, argmax, end, alone))
            result = UNFINISHED;
    }
};

}  // namespace

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#ifndef MADE_OF
#define MADE_OF ""
#endif

extern "C" {

// A hash of the sources and flags (build.py), by which Python recognises a current library.
EXPORT const char* polyhead_made_of() { return MADE_OF; }

// The sizes that Python's mirrors of the structures must have.
EXPORT int polyhead_sizes(int which) {
    const size_t sizes[] = {sizeof(Plan), sizeof(Layer), sizeof(Linear), sizeof(StepInput), sizeof(LowRank), sizeof(Sample),
                            sizeof(Routing), sizeof(Expert), sizeof(Mixture), sizeof(Source), sizeof(StepCall)};
    return int(sizes[which]);
}

// Whether all weights are stored exactly in `format`; see pack_narrow.
EXPORT int polyhead_pack(const Source* source, int outputs, int inputs, int k, int format, float unit, int only_found,
                         void* out) {
    if (format == INT8_WIDE) { pack_wide(*source, outputs, inputs, k, unit, static_cast<uint8_t*>(out)); return 1; }
    if (format != FLOAT32) return pack_narrow(*source, outputs, inputs, k, format, unit, only_found, static_cast<uint8_t*>(out));
    pack_float32(*source, outputs, inputs, k, static_cast<float*>(out));
    return 1;
}

// Blocks of a GGUF file, of one Kind.
EXPORT void polyhead_decode(int kind, const void* blocks, int64_t count, float* out) {
    decode(kind, static_cast<const uint8_t*>(blocks), count, out);
}
EXPORT int polyhead_are_finite(int kind, const void* blocks, int64_t count) {
    return are_finite(kind, static_cast<const uint8_t*>(blocks), count);
}
EXPORT float polyhead_largest(int kind, const void* blocks, int64_t count) {
    return largest_stored(kind, static_cast<const uint8_t*>(blocks), count);
}

// [rows, K] floats times packed weights, on the caller's thread.
EXPORT void polyhead_multiply(const Linear* l, const float* x, int rows, float* out) {
    Scratch<float> floats, scales, offsets;
    Scratch<int8_t> codes;
    const size_t count = size_t(rows) * l->inputs;
    const Operand operand{floats.reserve(count), codes.reserve(count), scales.reserve(count / SPAN),
                          offsets.reserve(count / GROUP), l->inputs};
    for (int r = 0; r < rows; ++r) prepare(operand, l->format, r, x + size_t(r) * l->inputs);
    gemm(*l, operand, rows, 0, l->outputs / COLUMNS, {out, l->outputs, STORE, 0});
}

EXPORT Model* polyhead_open(const Plan* plan, int threads) { return new Model(*plan, threads); }
EXPORT void polyhead_close(Model* model) { delete model; }
EXPORT int64_t polyhead_cache_bytes(const Model* model, int which) { return int64_t(model->cache_bytes(which)); }
EXPORT int64_t polyhead_layer_bytes(const Model* model, int which, int layer) { return int64_t(model->layer_bytes(which, layer)); }
EXPORT void polyhead_set_cache(Model* model, uint8_t* keys, uint8_t* values, float* states) {
    model->set_cache(keys, values, states);
}
// Begins steps and computes them for one turn of so many nanoseconds; 0: to the end.  One step is computed on all threads of
// its model.  Several steps, of different models, are computed on one thread each: the threads of the first model take one
// step after the other, so long steps should be first.  The turn is that of all together; of a step that begins after its
// end a piece is computed.  Until a step is finished, all its arrays stay where they are.
EXPORT void polyhead_step(StepCall* calls, int count, int64_t turn) {
    const TurnEnd end = turn_end(turn);
    if (count == 1) { calls->begin(end, false); return; }
    std::atomic<int> next{0};
    calls->model->run([&](int) {
        for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) calls[i].begin(end, true);
    });
}
// Goes on with a step that is in progress.  Returns its result.
EXPORT int polyhead_resume(Model* model, int64_t turn) {
    return model->resume(turn_end(turn)) ? int(Invalid::NONE) : UNFINISHED;
}

EXPORT Sampler* polyhead_open_sampler(int threads) { return new Sampler(threads); }
EXPORT void polyhead_close_sampler(Sampler* sampler) { delete sampler; }
EXPORT void polyhead_sample(Sampler* sampler, Sample* samples, int count) { sampler->sample(samples, count); }
}
