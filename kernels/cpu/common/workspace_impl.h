// How a kernel lays out its workspace, and how many bytes that takes. Both follow from the
// same lines: a layout is a struct whose constructor takes its buffers from a `Workspace`,
// one after the other. `BytesOf` runs it without any memory.
//
// Under AddressSanitizer nothing may touch the bytes beyond a buffer, before the next one.
//
// Included inside an unnamed namespace, after common/vec_impl.h and under the same rules.

struct Workspace {
  char* memory;  // 64-byte aligned; null to count
  int64_t bytes = 0;

  explicit Workspace(float* data) : memory((char*)data) {}

  // `count` elements, from the beginning of a cache line on.
  template <typename T>
  T* Take(int64_t count) {
    constexpr int64_t kLine = 64;
    const int64_t at = bytes, size = count * (int64_t)sizeof(T);
    bytes += CeilDiv(size, kLine) * kLine + kFenceBytes;
    if (!memory) return nullptr;
    if (kFenceBytes > 0) Confine(memory + at, size, bytes - at);
    return (T*)(memory + at);
  }
};

// Of the workspace that Layout(args...) is made for.
template <typename Layout, typename... Args>
int64_t BytesOf(const Args&... args) {
  Workspace counted(nullptr);
  const Layout layout(args..., counted);
  (void)layout;
  return counted.bytes;
}
