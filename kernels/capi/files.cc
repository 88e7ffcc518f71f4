#include "files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <sstream>

#include "failure.h"
#include "sha256.h"

namespace tracea::capi {
namespace {

constexpr const char* kSums = "SHA256SUMS";
constexpr size_t kDigits = 64;

struct Descriptor {
  int number;
  ~Descriptor() {
    if (number >= 0) ::close(number);
  }
};

std::string Read(const std::string& path, const std::string& bundle) {
  // A pipe that nobody writes to would block the opening for ever.
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  struct stat info {};
  if (file.number < 0 || ::fstat(file.number, &info) != 0) {
    const tracea_status status = errno == ENOENT ? TRACEA_INVALID : TRACEA_CPU_ERROR;
    Fail(status, bundle, " is no whole bundle: ", path, " cannot be read: ",
         std::strerror(errno), ".");
  }
  if (!S_ISREG(info.st_mode)) {
    Fail(TRACEA_INVALID, bundle, " is no whole bundle: ", path, " is no file.");
  }
  std::string bytes(static_cast<size_t>(info.st_size), '\0');
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t got = ::read(file.number, bytes.data() + done, bytes.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      Fail(TRACEA_CPU_ERROR, path, " cannot be read: ",
           got < 0 ? std::strerror(errno) : "it became shorter meanwhile", ".");
    }
    done += static_cast<size_t>(got);
  }
  return bytes;
}

// A name below the bundle: what a manifest says must not lead out of it.
bool IsInside(const std::string& name) {
  return !name.empty() && name[0] != '/' && name.find("..") == name.npos;
}

}  // namespace

std::map<std::string, std::string> ReadBundle(const std::string& path) {
  std::istringstream sums(Read(path + "/" + kSums, path));
  std::map<std::string, std::string> files;
  for (std::string line; std::getline(sums, line);) {
    // As of sha256sum: the digest, two spaces, the name.
    const std::string name = line.size() > kDigits + 2 ? line.substr(kDigits + 2) : "";
    if (!IsInside(name) || line.compare(kDigits, 2, "  ") != 0) {
      Fail(TRACEA_INVALID, path, " is no whole bundle: ", kSums, " has the line '", line,
           "'.");
    }
    std::string bytes = Read(path + "/" + name, path);
    if (Sha256(bytes) != line.substr(0, kDigits)) {
      Fail(TRACEA_INVALID, path, " is damaged: the sha256 of ", name,
           " is not that of when the bundle was written.");
    }
    files[name] = std::move(bytes);
  }
  return files;
}

}  // namespace tracea::capi
