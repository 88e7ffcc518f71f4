// The tile instructions of AMX in plain C++, for tests on processors without them.
//
// Sums may be rounded otherwise than by the instruction, and subnormal numbers are not
// flushed to zero. Included by common/amx_impl.h if TRACEA_EMULATE_AMX is defined, in place
// of the intrinsics of the same names.

struct EmulatedTiles {
  uint8_t rows[8][16][64];
  bool configured;
};

inline EmulatedTiles& Tiles() {
  static thread_local EmulatedTiles tiles;
  return tiles;
}

inline void EmulatedLoad(int tile, const void* from, int64_t stride) {
  if (!Tiles().configured) __builtin_trap();
  for (int i = 0; i < 16; ++i) {
    memcpy(Tiles().rows[tile][i], (const char*)from + i * stride, 64);
  }
}

inline void EmulatedStore(int tile, void* to, int64_t stride) {
  if (!Tiles().configured) __builtin_trap();
  for (int i = 0; i < 16; ++i) memcpy((char*)to + i * stride, Tiles().rows[tile][i], 64);
}

inline float WidenedBF16(const uint8_t* from) {
  uint16_t half;
  memcpy(&half, from, 2);
  const uint32_t bits = (uint32_t)half << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// sums[i][j] += lhs[i][2 p] * rhs[p][2 j] + lhs[i][2 p + 1] * rhs[p][2 j + 1]
inline void EmulatedProduct(int sums, int lhs, int rhs) {
  EmulatedTiles& tiles = Tiles();
  for (int i = 0; i < 16; ++i) {
    float row[16];
    memcpy(row, tiles.rows[sums][i], 64);
    for (int p = 0; p < 16; ++p) {
      const uint8_t* a = tiles.rows[lhs][i] + 4 * p;
      const float even = WidenedBF16(a), odd = WidenedBF16(a + 2);
      for (int j = 0; j < 16; ++j) {
        const uint8_t* b = tiles.rows[rhs][p] + 4 * j;
        row[j] += even * WidenedBF16(b);
        row[j] += odd * WidenedBF16(b + 2);
      }
    }
    memcpy(tiles.rows[sums][i], row, 64);
  }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) (void)(config), Tiles().configured = true
#define _tile_release() Tiles().configured = false
#define _tile_zero(tile) memset(Tiles().rows[tile], 0, sizeof(Tiles().rows[tile]))
#define _tile_loadd(tile, from, stride) EmulatedLoad(tile, from, stride)
#define _tile_stream_loadd(tile, from, stride) EmulatedLoad(tile, from, stride)
#define _tile_stored(tile, to, stride) EmulatedStore(tile, to, stride)
#define _tile_dpbf16ps(sums, lhs, rhs) EmulatedProduct(sums, lhs, rhs)
