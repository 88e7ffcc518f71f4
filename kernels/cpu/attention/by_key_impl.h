// Single queries whose softmax is computed key by key, in base e, as plain code would.
//
// The loops over blocks keep scores in base 2, where they overflow earlier, and give up on
// a row that has no finite positive sum of weights. Such a row is computed once more here:
// its scores overflowed, or were infinite or NaN to begin with, or it sees no key.
//
// A part of attention/common_impl.h.

constexpr float kInfinity = __builtin_inff();

TRACEA_INLINE float Magnitude(float x) { return __builtin_fabsf(x); }
TRACEA_INLINE bool IsFinite(float x) { return Magnitude(x) < kInfinity; }

// e^x, for x of at most 80.
TRACEA_INLINE float ExpOf(float x) { return Exp2(Splat(x * kLog2E))[0]; }

// Query i of head h of example b.
struct Query {
  const AttentionArgs& args;
  int64_t b, h, i;

  int64_t offset() const {
    return ((b * args.q_len + i) * args.heads + h) * args.head_dim;
  }
  // Of key j, in k and v.
  int64_t key_offset(int64_t j) const {
    const int64_t row = (b * args.kv_len + j) * args.kv_heads + h / args.group();
    return row * args.head_dim;
  }

  float Score(int64_t j) const {
    const DType type = args.type;
    const void *q = At(type, args.q, offset()), *k = At(type, args.k, key_offset(j));
    const float score = Dot(type, q, k, args.head_dim) * args.scale;
    if (!args.bias) return score;
    const int64_t* s = args.bias_strides;
    const int64_t at = b * s[0] + h * s[1] + i * s[2] + j * s[3];
    return score + LoadElement(args.bias, args.bias_type, at);
  }

  // Calls body(j) with each key that the query sees, of those in `among`, until one of the
  // calls returns false.
  template <typename Body>
  void ForKeys(Interval among, const Body& body) const {
    const int64_t* s = args.mask_strides;
    const int64_t row = b * s[0] + h * s[1] + i * s[2];
    const Interval keys = Intersect(KeysOf(args, b, i), among);
    for (int64_t j = keys.lo; j < keys.hi; ++j) {
      if (args.mask && !args.mask[row + j * s[3]]) continue;
      if (!body(j)) return;
    }
  }
};

// The weights of a query's keys: e^(score - most) / total. They are all NaN if `most` is
// not finite.
struct Weights {
  float most, total;
  bool sees_any;

  TRACEA_INLINE float Of(float score) const { return ExpOf(score - most) / total; }
  float lse() const {
    return IsFinite(most) ? most + Log2(total) * kLn2 : most;
  }
};

// `worst`: a key that made an earlier query's weights NaN, or none of 0 .. kv_len - 1. It
// is looked at first, and is the one that does so to this query's, if any does.
Weights WeightsOf(const Query& query, int64_t* worst) {
  float most = -kInfinity, total = 0;
  bool sees_any = false;
  const auto look = [&](int64_t j) {
    const float score = query.Score(j);
    sees_any = true;
    if (!(score <= most)) most = score;
    if (most < kInfinity) return true;
    *worst = j;
    return false;
  };
  query.ForKeys({*worst, *worst + 1}, look);
  if (most < kInfinity) query.ForKeys({0, query.args.kv_len}, look);
  if (IsFinite(most)) {
    query.ForKeys({0, query.args.kv_len}, [&](int64_t j) {
      total += ExpOf(query.Score(j) - most);
      return true;
    });
  }
  return {most, total, sees_any};
}
