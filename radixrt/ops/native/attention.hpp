// Attention: the work of attention over one batch, for layers with one window, in items that threads claim in any order.
//
// Positions are cut into spans of 128, from 0. A row's result is its parts over the spans it sees, each computed from scratch and merged in
// order: so it has the same bits however the work is cut, shared and ordered.
//   few queries    (their sequence's fit into one block) an item is a run of units. A unit is a span of one sequence or of several that have
//                  the same slots in at least half of it. It is made of pieces, each read once for all rows that have it: what a prefix is
//                  shared by is seen in the slots. Parts go to the arena; whoever computes the last part of a row merges them.
//   many queries   an item is a block of rows of one sequence, which takes the spans one after another and merges as it goes.
//
//   sequence 0   |--- span 0 ---|--- span 1 ---|--- span 2 |          units: A = span 0 of 0, 1, 2     D = span 2 of 0
//   sequence 1   |--- same -----|--- same --|oth|- other -|                  B = span 1 of 0, 1        E = span 2 of 1
//   sequence 2   |--- same -----|--- other -|                                C = span 1 of 2           pieces of B: |--- 0, 1 --|0|, |1|
//
// What the constructor is given is only read, by the constructor and by run(), and must live as long.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels.hpp"

namespace radixrt {

class Attention {
public:
    static constexpr int kQueries = kMostQueries;
    static constexpr size_t kMostParts = size_t(64) << 20;         // floats of the arena; sequences beyond it do as those with many queries
    static constexpr int kItemsPerThread = 8;                      // about, where there is so much to share out
    static constexpr int kLeast = 16;                              // positions that sequences which part in a span must have in common there to share them
    static constexpr int kLoad = 8;                                // to read a key and a value is as much work as so many queries

    class Arena {  // the parts of one layer; kept by the caller, as large as the largest batch needed
    public:
        void reserve(size_t floats) {
            if (floats <= size_) return;
            parts_.reset(), size_ = 0;
            parts_.reset(new float[floats]), size_ = floats;
        }
        float* data() { return parts_.get(); }

    private:
        std::unique_ptr<float[]> parts_;
        size_t size_ = 0;
    };

    static size_t part_floats(int dim) { return size_t(whole_lanes(dim)) + 2; }
    static size_t kernel_floats(int dim) { return size_t(whole_lanes(dim)) * kChunk * 2 + kQueries * kSpan + 5 * kChunk; }
    // of the scratch that every thread has for run()
    static size_t scratch_floats(int dim) { return 16 + kernel_floats(dim) + 2 * kQueries * part_floats(dim); }

    // window: how many positions a query sees, its own included; 0: all up to its own
    Attention(const int32_t* q_lens, const int32_t* kv_lens, const int32_t* kv_slots, int sequences, int heads, int kv_heads, int dim,
              int window, int threads, bool share, Arena& arena, size_t most_parts = kMostParts)
        : heads_(heads), kv_heads_(kv_heads), group_(heads / kv_heads), dim_(dim), window_(window), part_(part_floats(dim)), arena_(arena) {
        block_rows_ = std::max(1, kQueries / group_);
        std::vector<Sequence> few;
        size_t parts = 0;
        int row = 0;
        for (int s = 0; s < sequences; kv_slots += kv_lens[s], row += q_lens[s], s++) {
            const Sequence sequence{row, q_lens[s], kv_lens[s] - q_lens[s], kv_lens[s], kv_slots};
            if (sequence.rows == 0) continue;
            const size_t spans = size_t(last_span(sequence) - first_span(sequence) + 1);
            const size_t more = spans * size_t(sequence.rows);  // at most
            if (sequence.rows <= block_rows_ && (parts + more) * size_t(heads) * part_ <= most_parts) {
                parts += more;
                few.push_back(sequence);
            } else {
                for (int i = 0; i < sequence.rows; i += block_rows_) {
                    const int n = std::min(block_rows_, sequence.rows - i);
                    blocks_.push_back({row + i, n, sequence.position + i, sequence.position + i + n, kv_slots});
                }
            }
        }
        const auto work = [this](const Sequence& b) { return int64_t(b.rows) * (b.end - first_seen(b)); };
        std::stable_sort(blocks_.begin(), blocks_.end(), [&](const Sequence& a, const Sequence& b) { return work(a) > work(b); });
        make_units(few, share);
        cut(threads);
        pending_.reset(new std::atomic<int32_t>[rows_.size() * size_t(kv_heads)]);
        arena.reserve(parts_ * size_t(heads) * part_);
    }

    void begin() {  // before the items of each layer, by one thread
        for (size_t i = 0; i < rows_.size(); i++)
            for (int h = 0; h < kv_heads_; h++)
                pending_[i * size_t(kv_heads_) + size_t(h)].store(rows_[i].parts, std::memory_order_relaxed);
    }

    // Blocks of 16 slots of which the batch reads a good part, each once, up to `most`.
    std::vector<uint32_t> blocks(size_t most) const {
        std::vector<uint32_t> found;
        size_t of_span = 0;  // where in `found` those of the span begin, which many sequences may have
        int span = -1;
        for (const auto& piece : pieces_) {
            if (piece.begin / kSpan != span) span = piece.begin / kSpan, of_span = found.size();
            for (int i = 0, n = piece.end - piece.begin, j; i < n; i = j) {
                const uint32_t block = uint32_t(piece.slots[i]) / kLanes;
                for (j = i + 1; j < n && uint32_t(piece.slots[j]) / kLanes == block;) j++;
                if (j - i < kLanes / 4 || std::find(found.begin() + long(of_span), found.end(), block) != found.end()) continue;
                if (found.size() == most) return found;
                found.push_back(block);
            }
        }
        return found;
    }

    int items() const { return int(blocks_.size() + cuts_.size()) * kv_heads_; }
    int pieces() const { return int(pieces_.size()); }

    // q [rows, heads * query_floats(kind, dim)], out [rows, heads * dim]; k, v [kv_heads, slots, kv_elements(kind, dim)], so that a head's
    // slots are one stream; for kI16 slots is a multiple of 16. finished(row, head, heads): so many heads of a row are in `out` now.
    template <class Finished>
    void run(int item, const Kernels& kernels, const float* q, const void* k, const void* v, size_t slots, KV kind, float scale, float* out,
             float* scratch, Finished finished) {
        const size_t which = size_t(item / kv_heads_);
        const int kv_head = item % kv_heads_;
        const size_t head_bytes = slots * kv_bytes(kind, dim_), at = size_t(kv_head) * head_bytes;
        KVHead head{static_cast<const char*>(k) + at, static_cast<const char*>(v) + at, kv_elements(kind, dim_), dim_, kind};
        scratch += (64 - reinterpret_cast<uintptr_t>(scratch) % 64) % 64 / sizeof(float);
        Call call{kernels, head, q, query_floats(kind, dim_), out, scale, scratch, kv_head};
        if (which < blocks_.size()) return run_block(blocks_[which], call, finished);
        const size_t cut = which - blocks_.size();
        const size_t end = cut + 1 < cuts_.size() ? cuts_[cut + 1] : units_.size();
        for (size_t i = cuts_[cut]; i < end; i++) {
            const bool more = i + 1 < end, other_head = !more && kv_head + 1 < kv_heads_;  // else the next item is the next cut's first
            const size_t next_unit = other_head ? cuts_[cut] : i + 1;
            const Piece next = next_unit < units_.size() ? pieces_[units_[next_unit].first_piece] : Piece{};
            head.ahead = next.slots;
            head.ahead_count = next.end - next.begin;
            head.ahead_k = more ? head.k : static_cast<const char*>(k) + (other_head ? at + head_bytes : 0);
            run_unit(units_[i], call, finished);
        }
    }

private:
    struct Sequence {  // or some rows of one
        int row, rows;      // in the batch
        int position, end;  // of the first row; behind the last one
        const int32_t* slots;
    };

    struct Row {
        int row, from, to;  // sees the positions from <= p < to
        int parts;          // one for each span
        size_t part;        // the first, in the arena, in units of heads * part_
    };

    struct Unit {
        int span;
        size_t first_row, last_row;      // in seen_
        size_t first_piece, last_piece;  // in pieces_, whose queries are counted in rows from first_row
    };

    struct Member {
        int sequence, group;
    };

    struct Part {  // of a sequence in a unit
        const Sequence* of;
        int end;                  // of its positions in the span
        int first_row, last_row;  // counted as in pieces_
    };

    struct Call {
        const Kernels& kernels;
        const KVHead& head;
        const float* q;
        size_t query_floats;
        float* out;
        float scale;
        float* scratch;
        int kv_head;
    };

    struct Queries {  // of one call of a kernel
        int count = 0;
        const float* q[kQueries];
        int32_t from[kQueries], to[kQueries];
        float* part[kQueries];

        void add(const float* query, int first, int last, float* to_part) {
            q[count] = query, from[count] = first, to[count] = last, part[count] = to_part;
            count++;
        }
    };

    int first_seen(const Sequence& s) const { return window_ ? std::max(0, s.position - window_ + 1) : 0; }
    int first_span(const Sequence& s) const { return first_seen(s) / kSpan; }
    static int last_span(const Sequence& s) { return (s.end - 1) / kSpan; }
    int from(int position) const { return window_ ? std::max(0, position - window_ + 1) : 0; }

    // Span after span; within a span the sequences that have shared the one before stand together, so that mostly a comparison of
    // neighbours is all there is to do.
    void make_units(const std::vector<Sequence>& few, bool share) {
        std::vector<size_t> first_row(few.size());
        std::vector<int> entering(few.size());
        for (size_t i = 0; i < few.size(); i++) {
            entering[i] = int(i);
            first_row[i] = rows_.size();
            for (int r = 0; r < few[i].rows; r++) {
                const int position = few[i].position + r, begin = from(position);
                const int spans = position / kSpan - begin / kSpan + 1;
                rows_.push_back({few[i].row + r, begin, position + 1, spans, parts_});
                parts_ += size_t(spans);
            }
        }
        std::stable_sort(entering.begin(), entering.end(), [&](int a, int b) { return first_span(few[a]) < first_span(few[b]); });
        std::vector<Member> members;
        size_t next = 0;
        for (int span = 0; next < few.size() || !members.empty(); span++) {
            if (members.empty()) span = first_span(few[entering[next]]);
            const size_t were = members.size();
            for (; next < few.size() && first_span(few[entering[next]]) == span; next++) members.push_back({entering[next], 0});
            if (were && were < members.size())
                for (auto& member : members) member.group = 0;
            const auto begin = [&](int s) { return std::max(span * kSpan, first_seen(few[s])); };
            const auto end = [&](int s) { return std::min((span + 1) * kSpan, few[s].end); };
            // those with the same slots up to any position stand together, the ones that end there first
            const auto order = [&](int a, int b) {
                if (begin(a) != begin(b)) return begin(a) - begin(b);
                const int32_t *x = few[a].slots + begin(a), *y = few[b].slots + begin(b);
                const int differ = x == y ? 0 : std::memcmp(x, y, sizeof(int32_t) * size_t(std::min(end(a), end(b)) - begin(a)));
                return differ ? differ : end(a) - end(b);
            };
            int groups = 0, before = 0;
            for (size_t i = 0, j; i < members.size(); i = j) {
                for (j = i + 1; j < members.size() && members[j].group == members[i].group;) j++;
                const auto run = members.begin() + long(i), behind = members.begin() + long(j);
                if (share && std::any_of(run + 1, behind, [&](const Member& m) { return order(run->sequence, m.sequence) != 0; }))
                    std::stable_sort(run, behind, [&](const Member& a, const Member& b) { return order(a.sequence, b.sequence) < 0; });
                for (size_t first = i, last; first < j; first = last) {
                    const int leader = members[first].sequence;
                    units_.push_back({span, seen_.size(), seen_.size(), pieces_.size(), pieces_.size()});
                    std::vector<Part> parts;
                    for (last = first; last < j; last++) {
                        const int s = members[last].sequence, longest = std::max(end(s), end(leader)) - begin(s);
                        if (last > first && (!share || begin(s) != begin(leader) ||
                                             2 * (common(few[leader], few[s], begin(s), (span + 1) * kSpan) - begin(s)) < longest))
                            break;
                        const size_t rows = seen_.size();
                        for (int r = 0; r < few[s].rows; r++) {
                            const Row& row = rows_[first_row[s] + size_t(r)];
                            if (row.from < end(s) && row.to > begin(s)) seen_.push_back(first_row[s] + size_t(r));
                        }
                        if (last > first && seen_.size() - units_.back().first_row > size_t(block_rows_)) {
                            seen_.resize(rows);
                            break;
                        }
                        parts.push_back({&few[s], end(s), int(rows - units_.back().first_row), int(seen_.size() - units_.back().first_row)});
                    }
                    make_pieces(parts.data(), parts.data() + parts.size(), begin(leader));
                    units_.back().last_row = seen_.size();
                    units_.back().last_piece = pieces_.size();
                }
                for (size_t k = i; k < j; k++) {
                    if (k == i || !share || order(before, members[k].sequence) != 0) groups++;
                    before = members[k].sequence;
                    members[k].group = groups;
                }
            }
            members.erase(std::remove_if(members.begin(), members.end(), [&](const Member& m) { return last_span(few[m.sequence]) == span; }),
                          members.end());
        }
    }

    // Up to where two sequences with the same positions before `begin` have the same slots, `end` at most.
    static int common(const Sequence& a, const Sequence& b, int begin, int end) {
        end = std::min(end, std::min(a.end, b.end));
        while (begin < end && a.slots[begin] == b.slots[begin]) begin++;
        return begin;
    }

    // Pieces of some sequences, in order, from the position `begin` on, up to which they have the same slots.
    void make_pieces(const Part* first, const Part* last, int begin) {
        for (const Part *part = first, *behind; part < last; part = behind) {
            behind = part + 1;
            if (part->end <= begin) continue;
            int end = part->end;
            for (; behind < last; behind++) {
                const int both = common(*part->of, *behind->of, begin, std::min(part->end, behind->end));
                if (both - begin < kLeast) break;
                end = both;
            }
            pieces_.push_back({begin, end, part->of->slots + begin, part->first_row, (behind - 1)->last_row});
            if (behind > part + 1) make_pieces(part, behind, end);
        }
    }

    int64_t work(const Unit& u) const {
        int64_t all = 0;
        for (size_t i = u.first_piece; i < u.last_piece; i++)
            all += int64_t(pieces_[i].end - pieces_[i].begin) * (kLoad + int64_t(pieces_[i].last - pieces_[i].first) * group_);
        return all;
    }

    void cut(int threads) {
        int64_t all = 0, done = 0;
        for (const auto& unit : units_) all += work(unit);
        const int64_t cuts = std::max(1, (kItemsPerThread * threads + kv_heads_ - 1) / kv_heads_);
        for (size_t i = 0; i < units_.size(); i++) {
            if (done * cuts >= all * int64_t(cuts_.size())) cuts_.push_back(i);
            done += work(units_[i]);
        }
    }

    float* part(const Row& row, int index, int head) const {
        return arena_.data() + ((row.part + size_t(index)) * size_t(heads_) + size_t(head)) * part_;
    }

    const float* query(const Call& call, int row, int head) const { return call.q + (size_t(row) * heads_ + head) * call.query_floats; }

    static void attend(const Call& call, const Piece* pieces, int count, const Queries& of) {
        call.kernels.attend(call.head, pieces, count, of.q, of.from, of.to, of.count, call.scale, of.part, call.scratch);
    }

    template <class Finished>
    void run_unit(const Unit& unit, const Call& call, Finished finished) {
        const int first_head = call.kv_head * group_, behind = first_head + group_;
        const int heads_at_once = std::min(group_, kQueries / int(unit.last_row - unit.first_row));
        for (int first = first_head; first < behind; first += heads_at_once) {
            const int heads = std::min(heads_at_once, behind - first);
            Queries queries;
            for (size_t i = unit.first_row; i < unit.last_row; i++) {
                const Row& row = rows_[seen_[i]];
                for (int head = first; head < first + heads; head++)
                    queries.add(query(call, row.row, head), row.from, row.to, part(row, unit.span - row.from / kSpan, head));
            }
            Piece pieces[2 * kQueries];  // as many as a tree with so many leaves has nodes, at most
            int count = 0;
            for (size_t i = unit.first_piece; i < unit.last_piece; i++) {
                Piece& piece = pieces[count++] = pieces_[i];
                piece.first *= heads, piece.last *= heads;
            }
            attend(call, pieces, count, queries);
        }
        for (size_t i = unit.first_row; i < unit.last_row; i++) {
            const Row& row = rows_[seen_[i]];
            auto& pending = pending_[seen_[i] * size_t(kv_heads_) + size_t(call.kv_head)];
            if (pending.fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
            for (int head = first_head; head < first_head + group_; head++) {
                float* into = part(row, 0, head);
                for (int p = 1; p < row.parts; p++) call.kernels.merge(into, part(row, p, head), dim_);
                call.kernels.finish(into, dim_, call.out + (size_t(row.row) * heads_ + head) * dim_);
            }
            finished(row.row, first_head, group_);
        }
    }

    template <class Finished>
    void run_block(const Sequence& block, const Call& call, Finished finished) const {
        float *running = call.scratch + kernel_floats(dim_), *fresh = running + kQueries * part_;
        const int heads_at_once = std::min(group_, kQueries / block.rows), behind = (call.kv_head + 1) * group_;
        for (int first = call.kv_head * group_; first < behind; first += heads_at_once) {
            const int heads = std::min(heads_at_once, behind - first);
            for (int span = first_span(block), last = last_span(block), start = span; span <= last; span++) {
                const int begin = std::max(span * kSpan, first_seen(block)), end = std::min((span + 1) * kSpan, block.end);
                Queries queries;
                for (int r = 0; r < block.rows; r++) {
                    const int position = block.position + r;
                    for (int h = 0; h < heads; h++)
                        queries.add(query(call, block.row + r, first + h), from(position), position + 1,
                                    (span == start ? running : fresh) + size_t(r * heads + h) * part_);
                }
                const Piece piece{begin, end, block.slots + begin, 0, queries.count};
                attend(call, &piece, 1, queries);
                if (span == start) continue;
                for (int i = 0; i < queries.count; i++)
                    if (queries.from[i] < end && queries.to[i] > begin) call.kernels.merge(running + size_t(i) * part_, queries.part[i], dim_);
            }
            for (int r = 0; r < block.rows; r++) {
                for (int h = 0; h < heads; h++)
                    call.kernels.finish(running + size_t(r * heads + h) * part_, dim_,
                                        call.out + (size_t(block.row + r) * heads_ + first + h) * dim_);
                finished(block.row + r, first, heads);
            }
        }
    }

    const int heads_, kv_heads_, group_, dim_, window_;
    const size_t part_;
    Arena& arena_;
    int block_rows_ = 1;
    size_t parts_ = 0;
    std::vector<Sequence> blocks_;
    std::vector<Row> rows_;
    std::vector<size_t> seen_;  // indices in rows_
    std::vector<Unit> units_;
    std::vector<Piece> pieces_;
    std::vector<size_t> cuts_;  // where in units_ the runs begin
    std::unique_ptr<std::atomic<int32_t>[]> pending_;
};

}  // namespace radixrt
