#include "cubin_registry.h"

#include <cstdint>
#include <cstring>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "cubin_file.h"
#include "sha256.h"

namespace tracea {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_map<std::string, Image> by_sha256;
  std::unordered_map<std::string, Image> by_key;  // what this process lowered
  std::string directory;
};

// Never destroyed: executables may outlive static destructors.
Registry& TheRegistry() {
  static Registry& registry = *new Registry();
  return registry;
}

// Attributes may come from a foreign file, and both names become part of a path.
bool IsName(std::string_view name) {
  constexpr std::string_view kAllowed = "abcdefghijklmnopqrstuvwxyz0123456789_";
  return !name.empty() && name.find_first_not_of(kAllowed) == std::string_view::npos;
}

// RFC 4648, with padding, no white space; nothing for any other text.
std::optional<std::string> DecodeBase64(std::string_view text) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  if (text.size() % 4 != 0) return std::nullopt;
  while (!text.empty() && text.back() == '=') text.remove_suffix(1);
  int8_t value[256];
  std::memset(value, -1, sizeof(value));
  for (size_t i = 0; i < kDigits.size(); ++i) {
    value[static_cast<uint8_t>(kDigits[i])] = static_cast<int8_t>(i);
  }
  std::string bytes;
  bytes.reserve(text.size() * 3 / 4);
  uint32_t buffer = 0;
  int bits = 0;
  for (char c : text) {
    const int8_t digit = value[static_cast<uint8_t>(c)];
    if (digit < 0) return std::nullopt;
    buffer = buffer << 6 | static_cast<uint32_t>(digit);
    bits += 6;
    if (bits >= 8) {
      bits -= 8;
      bytes.push_back(static_cast<char>(buffer >> bits & 0xff));
    }
  }
  return bytes;
}

template <typename T>
T ReadAt(std::string_view bytes, size_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(value));
  return value;
}

// Whether a table of `count` entries of `size` bytes at `offset` lies within `total`.
bool Fits(uint64_t offset, uint64_t count, uint64_t size, uint64_t total) {
  return offset <= total && count * size <= total - offset;
}

// The image that these bytes are, shared with everyone who has the same.
Image Intern(std::string bytes) {
  std::string sha256 = Sha256(bytes);
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  Image& slot = registry.by_sha256[sha256];
  if (slot == nullptr) {
    slot = std::make_shared<const Cubin>(Cubin{std::move(bytes), std::move(sha256)});
  }
  return slot;
}

// Nothing, or why these bytes are not the image that the query means.
std::string WhyNotImage(const CubinQuery& query, std::string_view bytes) {
  if (const char* why_not = WhyNotCubin(bytes)) {
    return std::string("is no cubin: ") + why_not;
  }
  if (query.sha256.empty() || Sha256(bytes) == query.sha256) return "";
  return "is another image: its sha256 is not " + std::string(query.sha256);
}

// Each sets the image, or returns why not, as a sentence.

std::string FromProgram(const CubinQuery& query, Image* image) {
  if (query.embedded.empty()) return "The program carries no copy.";
  if (query.embedded.size() > kMaxCubinBytes / 3 * 4) {
    return "The copy that the program carries is larger than an image may be.";
  }
  std::optional<std::string> bytes = DecodeBase64(query.embedded);
  if (!bytes) return "The copy that the program carries is no base64.";
  if (auto why_not = WhyNotImage(query, *bytes); !why_not.empty()) {
    return "The copy that the program carries " + why_not + ".";
  }
  *image = Intern(std::move(*bytes));
  return "";
}

std::string FromProcess(const CubinQuery& query, Image* image) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  const bool has_sha256 = !query.sha256.empty();
  const auto& known = has_sha256 ? registry.by_sha256 : registry.by_key;
  auto it = known.find(std::string(has_sha256 ? query.sha256 : query.key));
  if (it == known.end()) return "It is not registered in this process.";
  *image = it->second;
  return "";
}

std::string FromStore(const CubinQuery& query, Image* image) {
  std::string directory;
  {
    Registry& registry = TheRegistry();
    std::lock_guard<std::mutex> lock(registry.mutex);
    directory = registry.directory;
  }
  if (directory.empty()) return "No cache directory is set.";
  const std::string place =
      "It cannot be taken from " + CubinPath(directory, query.arch, query.key);
  if (query.sha256.empty()) {
    return place + ": the program does not state its sha256.";
  }
  std::string bytes;
  std::string why_not = ReadCubin(directory, query.arch, query.key, &bytes);
  if (!why_not.empty()) return place + ": " + why_not + ".";
  // A damaged file stays; the store replaces it at the next lowering.
  why_not = WhyNotImage(query, bytes);
  if (!why_not.empty()) return place + ", which " + why_not + ".";
  *image = Intern(std::move(bytes));
  return "";
}

}  // namespace

const char* WhyNotCubin(std::string_view bytes) {
  constexpr size_t kHeaderBytes = 64;  // Elf64_Ehdr
  if (bytes.size() < kHeaderBytes) return "it is shorter than an ELF header";
  if (bytes.substr(0, 5) != "\x7f" "ELF\x02") return "it is not a 64-bit ELF file";
  const auto program_headers = ReadAt<uint64_t>(bytes, 32);
  const auto section_headers = ReadAt<uint64_t>(bytes, 40);
  const auto program_header_size = ReadAt<uint16_t>(bytes, 54);
  const auto program_header_count = ReadAt<uint16_t>(bytes, 56);
  const auto section_size = ReadAt<uint16_t>(bytes, 58);
  const auto section_count = ReadAt<uint16_t>(bytes, 60);
  if (section_size != 64) return "its section headers have an unknown size";
  if (!Fits(program_headers, program_header_count, program_header_size, bytes.size()) ||
      !Fits(section_headers, section_count, section_size, bytes.size())) {
    return "it is cut short";
  }
  constexpr uint32_t kNoBits = 8;  // SHT_NOBITS: occupies no space in the file
  for (int i = 0; i < section_count; ++i) {
    const size_t section = section_headers + static_cast<size_t>(i) * section_size;
    const auto type = ReadAt<uint32_t>(bytes, section + 4);
    const auto offset = ReadAt<uint64_t>(bytes, section + 24);
    const auto size = ReadAt<uint64_t>(bytes, section + 32);
    if (type != kNoBits && !Fits(offset, 1, size, bytes.size())) return "it is cut short";
  }
  return nullptr;
}

void PutCubin(const std::string& key, std::string bytes) {
  Image image = Intern(std::move(bytes));
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  registry.by_key.emplace(key, std::move(image));
}

bool HasCubin(const std::string& key) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  return registry.by_key.count(key) > 0;
}

void SetCubinDirectory(std::string directory) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  registry.directory = std::move(directory);
}

ffi::Error ResolveCubin(const CubinQuery& query, Image* image) {
  if (!IsName(query.key) || !IsName(query.arch)) {
    return ffi::Error::InvalidArgument(
        "kernel_key and arch must consist of lower-case letters, digits and '_'; they are '" +
        std::string(query.key) + "' and '" + std::string(query.arch) + "'.");
  }
  std::string reasons;
  for (auto* source : {&FromProgram, &FromProcess, &FromStore}) {
    const std::string why_not = source(query, image);
    if (why_not.empty()) return ffi::Error::Success();
    reasons += " " + why_not;
  }
  return FailedPrecondition(
      "Kernel " + std::string(query.entry) + " has no compiled image of key " +
      std::string(query.key) + " (" + std::string(query.arch) + ")." + reasons +
      " Lower the function in this process, set TRACEA_CACHE_DIR to the cache that holds "
      "the kernel, or export the program again with jax.export, which embeds its kernels.");
}

}  // namespace tracea
