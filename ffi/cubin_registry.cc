#include "cubin_registry.h"

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <mutex>
#include <optional>
#include <unordered_map>

namespace tracea {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_map<std::string, Image> images;
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

std::string StorePath(const std::string& directory, const CubinQuery& query) {
  return directory + "/cubin/" + std::string(query.arch) + "/" + std::string(query.key) +
         ".cubin";
}

std::optional<std::string> ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(file), {});
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

ffi::Error NotFound(const CubinQuery& query, const std::string& directory) {
  const std::string place = directory.empty() ? "and no cache directory is set"
                                              : "nor in " + StorePath(directory, query);
  return FailedPrecondition(
      "Kernel " + std::string(query.entry) + " has no compiled image: key " +
      std::string(query.key) + " (" + std::string(query.arch) +
      ") is not registered in this process " + place +
      ", and the program carries no copy. Lower the function in this process, set "
      "TRACEA_CACHE_DIR to the cache that holds the kernel, or export the program again "
      "with jax.export, which embeds its kernels.");
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

void PutCubin(const std::string& key, std::string image) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  Image& slot = registry.images[key];
  if (slot == nullptr) slot = std::make_shared<const std::string>(std::move(image));
}

bool HasCubin(const std::string& key) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  return registry.images.count(key) > 0;
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
  const std::string key(query.key);
  Registry& registry = TheRegistry();
  std::string directory;
  {
    std::lock_guard<std::mutex> lock(registry.mutex);
    if (auto it = registry.images.find(key); it != registry.images.end()) {
      *image = it->second;
      return ffi::Error::Success();
    }
    directory = registry.directory;
  }
  std::optional<std::string> bytes;
  if (!directory.empty()) bytes = ReadFile(StorePath(directory, query));
  // A damaged file is passed over here; the store replaces it at the next lowering.
  if (!bytes || WhyNotCubin(*bytes)) bytes = DecodeBase64(query.embedded);
  if (!bytes || bytes->empty()) return NotFound(query, directory);
  if (const char* why_not = WhyNotCubin(*bytes)) {
    return ffi::Error(ffi::ErrorCode::kDataLoss,
                      "The embedded image of kernel " + std::string(query.entry) +
                          " is no cubin: " + why_not + ". Export the program again.");
  }
  *image = std::make_shared<const std::string>(std::move(*bytes));
  PutCubin(key, **image);
  return ffi::Error::Success();
}

}  // namespace tracea
