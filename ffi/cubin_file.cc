#include "cubin_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace tracea {
namespace {

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

 private:
  const int fd_;
};

constexpr int kReadDirectory = O_RDONLY | O_DIRECTORY | O_CLOEXEC;

std::string CannotOpen(const std::string& path, int error) {
  if (error == ENOENT) return "it is not there";
  if (error == ELOOP) return path + " is a symbolic link";
  return path + " cannot be opened: " + std::strerror(error);
}

// What lets others than the user and root decide what is in an open file or directory.
std::string WhyNotTrusted(const FileDescriptor& file, const std::string& path) {
  struct stat status;
  if (fstat(file.get(), &status) != 0) return CannotOpen(path, errno);
  if (status.st_uid != 0 && status.st_uid != geteuid()) {
    return path + " belongs to user " + std::to_string(status.st_uid) +
           ", and only what you or root own is trusted";
  }
  if (status.st_mode & (S_IWGRP | S_IWOTH)) {
    return "others may write " + path + " (chmod go-w makes it trusted)";
  }
  return "";
}

std::string ReadRegular(const FileDescriptor& file, const std::string& path,
                        std::string* bytes) {
  struct stat status;
  if (fstat(file.get(), &status) != 0) return CannotOpen(path, errno);
  if (!S_ISREG(status.st_mode)) return path + " is no regular file";
  if (status.st_size > static_cast<off_t>(kMaxCubinBytes)) {
    return path + " has " + std::to_string(status.st_size) + " bytes, more than the " +
           std::to_string(kMaxCubinBytes) + " that an image may have";
  }
  bytes->resize(static_cast<size_t>(status.st_size));
  size_t done = 0;
  while (done < bytes->size()) {
    const ssize_t count = read(file.get(), bytes->data() + done, bytes->size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return path + " cannot be read: " + std::strerror(errno);
    if (count == 0) break;  // it became shorter; its hash will tell
    done += static_cast<size_t>(count);
  }
  bytes->resize(done);
  return "";
}

}  // namespace

std::string CubinPath(const std::string& directory, std::string_view arch,
                      std::string_view key) {
  return directory + "/cubin/" + std::string(arch) + "/" + std::string(key) + ".cubin";
}

std::string ReadCubin(const std::string& directory, std::string_view arch,
                      std::string_view key, std::string* bytes) {
  // The directory that the user named may be a link; what is below it is ours.
  const FileDescriptor root(open(directory.c_str(), kReadDirectory));
  if (!root.valid()) return CannotOpen(directory, errno);
  if (auto why_not = WhyNotTrusted(root, directory); !why_not.empty()) return why_not;

  std::string path = directory + "/cubin";
  const FileDescriptor store(openat(root.get(), "cubin", kReadDirectory | O_NOFOLLOW));
  if (!store.valid()) return CannotOpen(path, errno);
  if (auto why_not = WhyNotTrusted(store, path); !why_not.empty()) return why_not;

  const std::string arch_name(arch);
  path += "/" + arch_name;
  const FileDescriptor folder(
      openat(store.get(), arch_name.c_str(), kReadDirectory | O_NOFOLLOW));
  if (!folder.valid()) return CannotOpen(path, errno);
  if (auto why_not = WhyNotTrusted(folder, path); !why_not.empty()) return why_not;

  const std::string file_name = std::string(key) + ".cubin";
  path += "/" + file_name;
  // O_NONBLOCK: opening a FIFO would otherwise wait for a writer.
  const FileDescriptor file(openat(folder.get(), file_name.c_str(),
                                   O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (!file.valid()) return CannotOpen(path, errno);
  if (auto why_not = WhyNotTrusted(file, path); !why_not.empty()) return why_not;
  return ReadRegular(file, path, bytes);
}

}  // namespace tracea
