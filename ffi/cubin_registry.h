// Where compiled kernels come from: the program itself, a registry of this process, the
// cubin store on disk.
//
// A kernel's key is a hash of what was compiled (runtime/nvrtc.py); its image is known by
// the SHA-256 of its bytes, which the program states. Only programs are believed about
// it: nothing from a disk runs unless its bytes are those that the program was lowered
// with.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "status.h"

namespace tracea {

struct Cubin {
  std::string bytes;
  std::string sha256;  // of the bytes
};

using Image = std::shared_ptr<const Cubin>;

// Null, or what is wrong with the bytes as a cubin: not ELF, or cut short.
const char* WhyNotCubin(std::string_view bytes);

// Makes the image of a kernel known to this process. The bytes must be a whole cubin. The
// first image of a key stays.
void PutCubin(const std::string& key, std::string bytes);

bool HasCubin(const std::string& key);

// The directory of the cubin store (runtime/cubins.py), which holds
// cubin/<arch>/<key>.cubin; empty for none.
void SetCubinDirectory(std::string directory);

struct CubinQuery {
  std::string_view key;       // lower-case hexadecimal
  std::string_view arch;      // such as "sm_90a"
  std::string_view entry;     // for messages
  std::string_view sha256;    // of the image; empty in programs of earlier versions
  std::string_view embedded;  // base64 of the image, or empty
};

// The copy that the program carries, then the process registry, then the store, else
// FAILED_PRECONDITION with the reason of each. Without sha256, the store is not asked.
ffi::Error ResolveCubin(const CubinQuery& query, Image* image);

}  // namespace tracea
