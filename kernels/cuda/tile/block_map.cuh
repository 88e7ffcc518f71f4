// Which blocks of keys a tile of queries sees, from a map in memory: segments and masks
// whose content only the device knows.
//
//     words of a tile    seen, full    of blocks 0 .. 31, bit i of block i
//                        seen, full    of blocks 32 .. 63
//                        ...
//
// A block that is not seen is skipped. In one that is seen and not full each score needs a
// look. A walk visits the blocks that are seen, the last first; a rule on positions
// limits it. attention_map.cuh computes the words.
#pragma once

#include "ptx/sync.cuh"
#include "tile/common.cuh"
#include "tile/key_range.cuh"

namespace tracea {

template <bool kFirst, class First, class Second>
struct Choose {
  using Type = First;
};
template <class First, class Second>
struct Choose<false, First, Second> {
  using Type = Second;
};

// The lowest `count` bits: none if it is negative, all from 32 on.
TRACEA_HOST_DEVICE constexpr u32 lowest_bits(int count) {
  if (count <= 0) return 0;
  return count >= 32 ? ~u32{0} : (u32{1} << count) - 1;
}

// Of 32 blocks from block 32 word on, those of [first, last).
TRACEA_HOST_DEVICE constexpr u32 bits_of_range(int first, int last, int word) {
  return lowest_bits(last - 32 * word) & ~lowest_bits(first - 32 * word);
}

// A block that a tile sees, and what consumers must know of it, in a word.
struct SeenBlock {
  int code;

  TRACEA_HOST_DEVICE static constexpr SeenBlock of(int block, bool is_mixed, bool is_full,
                                                   bool is_last) {
    return {block << 3 | is_mixed << 2 | is_last << 1 | is_full << 0};
  }
  TRACEA_HOST_DEVICE constexpr int block() const { return code >> 3; }
  TRACEA_HOST_DEVICE constexpr bool is_full() const { return (code & 1) != 0; }
  TRACEA_HOST_DEVICE constexpr bool is_last() const { return (code & 2) != 0; }
  // Whether the map, and not only a rule on positions, has scores that do not count.
  TRACEA_HOST_DEVICE constexpr bool is_mixed() const { return (code & 4) != 0; }
};

class MapWalk {
 public:
  // Stands before the first block.
  TRACEA_DEVICE MapWalk(const u32* words, const BlockRange& range)
      : words_(words), range_(range), word_(ceil_div(range.last, 32)) {}

  // Goes to the next block, if there is one.
  TRACEA_DEVICE bool next() {
    while (left_ == 0) {
      if (32 * word_ <= range_.first) return false;
      --word_;
      left_ = words_[2 * word_] & bits_of_range(range_.first, range_.last, word_);
      full_ = words_[2 * word_ + 1];
    }
    bit_ = 31 - __clz(static_cast<int>(left_));
    left_ ^= u32{1} << bit_;
    return true;
  }

  TRACEA_DEVICE int block() const { return 32 * word_ + bit_; }
  TRACEA_DEVICE bool is_mixed() const { return (full_ >> bit_ & 1u) == 0; }
  TRACEA_DEVICE bool is_full() const { return !is_mixed() && range_.is_full(block()); }

 private:
  const u32* words_;
  const BlockRange range_;
  int word_, bit_ = 0;
  u32 left_ = 0, full_ = 0;  // of the blocks of the word, those that were not visited
};

// The blocks of a range, the last first, where there is no map.
class RangeWalk {
 public:
  TRACEA_DEVICE RangeWalk(const u32*, const BlockRange& range)
      : first_(range.first), at_(range.last) {}

  TRACEA_DEVICE bool next() { return --at_ >= first_; }
  TRACEA_DEVICE int block() const { return at_; }
  TRACEA_DEVICE bool is_mixed() const { return false; }
  TRACEA_DEVICE bool is_full() const { return false; }

 private:
  const int first_;
  int at_;
};

}  // namespace tracea
