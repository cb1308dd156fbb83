// A vocabulary as a trie in one array, in preorder, and the tokens that are whole plain characters of a JSON string ("text").
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

namespace radixrt {

// Node i: reached by `byte`, its subtree ends before `end`, `token` ends there (or -1; others that spell the same: `twin`).
struct Trie {
    std::vector<uint8_t> byte;
    std::vector<uint16_t> depth;
    std::vector<int32_t> end, token;
    std::vector<int32_t> order, first;  // all tokens in order; those of a subtree: order[first[i]] up to order[first[end[i]]]
    int32_t root[256];  // the first node of each byte, or -1
    int deepest = 0;

    size_t size() const { return byte.size(); }

    void build(const std::vector<std::string>& spelled, std::vector<int32_t> sorted, std::vector<int32_t>& twin) {
        order = std::move(sorted);
        int32_t index = -1;
        std::vector<int32_t> path;
        std::fill(root, root + 256, -1);
        const std::string* last = nullptr;
        for (int32_t id : order) {
            index++;
            const std::string& text = spelled[id];
            size_t shared = 0;
            if (last) {
                size_t most = std::min(text.size(), last->size());
                while (shared < most && text[shared] == (*last)[shared]) shared++;
            }
            while (path.size() > shared) {
                end[path.back()] = int32_t(size());
                path.pop_back();
            }
            for (size_t i = shared; i < text.size(); i++) {
                int32_t node = int32_t(size());
                if (i == 0) root[uint8_t(text[0])] = node;
                byte.push_back(uint8_t(text[i]));
                depth.push_back(uint16_t(i));
                end.push_back(0);
                token.push_back(-1);
                first.push_back(index);
                path.push_back(node);
            }
            deepest = std::max(deepest, int(text.size()));
            int32_t& here = token[path.back()];
            if (here >= 0) twin[id] = here;
            here = id;
            last = &text;
        }
        for (int32_t node : path) end[node] = int32_t(size());
        first.push_back(int32_t(order.size()));
    }

    // The child of a node by a byte (node -1: of the root), or -1.
    int32_t child(int32_t node, uint8_t b) const {
        if (node < 0) return root[b];
        for (int32_t i = node + 1; i < end[node]; i = end[i])
            if (byte[i] >= b) return byte[i] == b ? i : -1;
        return -1;
    }
};

// How many whole plain characters a token is; -1: something else is in it (a quote, a backslash, a control byte, half a character).
inline int text_length(const std::string& s) {
    int count = 0;
    for (size_t i = 0; i < s.size(); count++) {
        uint8_t c = uint8_t(s[i]);
        if (c < 0x20 || c == '"' || c == '\\') return -1;
        int more = c < 0x80 ? 0 : c >= 0xC2 && c < 0xE0 ? 1 : c >= 0xE0 && c < 0xF0 ? 2 : c >= 0xF0 && c < 0xF5 ? 3 : -1;
        if (more < 0 || i + more >= s.size()) return -1;
        for (int k = 1; k <= more; k++)
            if ((uint8_t(s[i + k]) & 0xC0) != 0x80) return -1;
        uint8_t second = more ? uint8_t(s[i + 1]) : 0;
        if ((c == 0xE0 && second < 0xA0) || (c == 0xED && second > 0x9F) || (c == 0xF0 && second < 0x90) ||
            (c == 0xF4 && second > 0x8F))
            return -1;
        i += 1 + more;
    }
    return count;
}

struct Vocabulary {
    std::vector<std::string> spelled;   // by id; empty: no text
    std::vector<int32_t> ends;          // ids that end a sequence
    std::vector<int32_t> twin;          // the next id that spells the same, or -1
    std::vector<std::vector<uint32_t>> text;  // [n]: the mask of all text tokens of at most n characters
    Trie all, plain, other;             // every token; those that are text; those that are not
    bool single[256] = {};              // bytes that are a token by themselves
    size_t words = 0;

    void build() {
        words = (spelled.size() + 31) / 32;
        twin.assign(spelled.size(), -1);
        std::vector<int32_t> order;
        for (size_t id = 0; id < spelled.size(); id++)
            if (!spelled[id].empty()) order.push_back(int32_t(id));
        std::sort(order.begin(), order.end(), [&](int32_t x, int32_t y) {
            int c = spelled[x].compare(spelled[y]);
            return c ? c < 0 : x > y;  // of twins the lowest id comes last and stands in the trie
        });
        all.build(spelled, order, twin);
        std::vector<int> length(spelled.size(), -1);
        std::vector<int32_t> rest, whole;
        int most = 0;
        for (int32_t id : order) {
            if (spelled[id].size() == 1) single[uint8_t(spelled[id][0])] = true;
            length[id] = text_length(spelled[id]);
            (length[id] < 0 ? rest : whole).push_back(id);
            most = std::max(most, length[id]);
        }
        std::vector<int32_t> same(spelled.size(), -1);
        other.build(spelled, rest, same);
        plain.build(spelled, whole, same);
        text.assign(most + 1, std::vector<uint32_t>(words, 0));
        for (int32_t id : order)
            if (length[id] > 0) text[length[id]][id >> 5] |= 1u << (id & 31);
        for (int n = 1; n <= most; n++)
            for (size_t w = 0; w < words; w++) text[n][w] |= text[n - 1][w];
    }
    int longest_text() const { return int(text.size()) - 1; }
    size_t memory() const {
        return (all.size() + plain.size() + other.size()) * 15 + text.size() * words * 4 + spelled.size() * (sizeof(std::string) + 8);
    }
};

}  // namespace radixrt
