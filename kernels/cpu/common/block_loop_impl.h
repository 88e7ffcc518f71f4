// The blocks of a range of a matrix product, in the order in which all kernels compute
// them:
//
//   for column strip j    (nc wide)
//     for row strip i     (mc rows)
//       for block p       (kc deep)
//
// Included inside an unnamed namespace, after common/vec_impl.h and under the same rules.

// One block of the depth of one row strip: rows [i0, i1), columns [j0, j0 + cols).
struct Block {
  int64_t i0, i1, j0, cols, p0, kc;
  bool first, last;  // of the depth
};

struct BlockLoop {
  MatrixRange range;
  int64_t depth;  // of the product; without any there is one block: the epilogue of zero
  int64_t kc, nc, mc;

  TRACEA_INLINE Block At(int64_t i, int64_t j, int64_t p) const {
    const int64_t deep = Min(kc, depth - p);
    return {i, Min(i + mc, range.m1), j, Min(nc, range.n1 - j), p, deep, p == 0,
            p + deep == depth};
  }
  TRACEA_INLINE Block First() const { return At(range.m0, range.n0, 0); }
  // False if `block` is the last one.
  TRACEA_INLINE bool Next(const Block& block, Block* next) const {
    int64_t i = block.i0, j = block.j0, p = block.p0 + block.kc;
    if (p >= depth) {
      p = 0;
      i = block.i1;
    }
    if (i >= range.m1) {
      i = range.m0;
      j += nc;
    }
    if (j >= range.n1) return false;
    *next = At(i, j, p);
    return true;
  }
  // Whether a column strip begins with the block.
  TRACEA_INLINE bool BeginsStrip(const Block& block) const {
    return block.first && block.i0 == range.m0;
  }

  template <typename Body>
  TRACEA_INLINE void ForEach(const Body& body) const {
    Block block = First();
    do {
      body(block);
    } while (Next(block, &block));
  }
};

// The width of column strips, at most `nc`, as equal as panels of `unit` columns allow: a
// narrow last one would use each packed lhs too little.
TRACEA_INLINE int64_t EqualWidth(const MatrixRange& range, int64_t nc, int64_t unit) {
  const int64_t width = range.n1 - range.n0;
  return CeilDiv(CeilDiv(width, CeilDiv(width, nc)), unit) * unit;
}
