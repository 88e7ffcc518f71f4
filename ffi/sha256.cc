#include "sha256.h"

#include <array>
#include <cstdint>
#include <cstring>

namespace tracea {
namespace {

constexpr size_t kBlockBytes = 64;

// FIPS 180-4, 4.2.2: fractional parts of the cube roots of the first 64 primes.
constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4,
    0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe,
    0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f,
    0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7,
    0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc,
    0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
    0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116,
    0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
    0xc67178f2};

// 5.3.3: of the square roots of the first 8 primes.
using State = std::array<uint32_t, 8>;
constexpr State kInitial = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                            0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

constexpr uint32_t RotateRight(uint32_t x, int n) { return x >> n | x << (32 - n); }

uint32_t BigEndian(const char* bytes) {
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) word = word << 8 | static_cast<uint8_t>(bytes[i]);
  return word;
}

// 6.2.2, one block.
void Absorb(const char* block, State* state) {
  uint32_t w[64];
  for (int t = 0; t < 16; ++t) w[t] = BigEndian(block + 4 * t);
  for (int t = 16; t < 64; ++t) {
    const uint32_t x = w[t - 15], y = w[t - 2];
    const uint32_t s0 = RotateRight(x, 7) ^ RotateRight(x, 18) ^ x >> 3;
    const uint32_t s1 = RotateRight(y, 17) ^ RotateRight(y, 19) ^ y >> 10;
    w[t] = w[t - 16] + s0 + w[t - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = *state;
  for (int t = 0; t < 64; ++t) {
    const uint32_t s1 = RotateRight(e, 6) ^ RotateRight(e, 11) ^ RotateRight(e, 25);
    const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRound[t] + w[t];
    const uint32_t s0 = RotateRight(a, 2) ^ RotateRight(a, 13) ^ RotateRight(a, 22);
    const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  const State worked = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < worked.size(); ++i) (*state)[i] += worked[i];
}

}  // namespace

std::string Sha256(std::string_view bytes) {
  State state = kInitial;
  const uint64_t bits = 8 * static_cast<uint64_t>(bytes.size());
  for (; bytes.size() >= kBlockBytes; bytes.remove_prefix(kBlockBytes)) {
    Absorb(bytes.data(), &state);
  }
  // 5.1.1: a one bit, zeros, and the length in bits as the last 8 bytes of a block.
  char tail[2 * kBlockBytes] = {};
  if (!bytes.empty()) std::memcpy(tail, bytes.data(), bytes.size());
  tail[bytes.size()] = static_cast<char>(0x80);
  const size_t length = bytes.size() + 9 <= kBlockBytes ? kBlockBytes : 2 * kBlockBytes;
  for (int i = 0; i < 8; ++i) {
    tail[length - 1 - i] = static_cast<char>(bits >> 8 * i & 0xff);
  }
  for (size_t at = 0; at < length; at += kBlockBytes) Absorb(tail + at, &state);
  constexpr char kDigits[] = "0123456789abcdef";
  std::string digest;
  for (uint32_t word : state) {
    for (int shift = 28; shift >= 0; shift -= 4) digest += kDigits[word >> shift & 15];
  }
  return digest;
}

}  // namespace tracea
