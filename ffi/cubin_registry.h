// Where compiled kernels come from: a registry of this process, then the cubin store.
//
// A kernel's key is a content hash (runtime/nvrtc.py), so an image found anywhere under a
// key is the right one and entries are never replaced.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "status.h"

namespace tracea {

using Image = std::shared_ptr<const std::string>;

// Null, or what is wrong with the bytes as a cubin: not ELF, or cut short.
const char* WhyNotCubin(std::string_view bytes);

// Makes an image known to this process. The bytes must be a whole cubin.
void PutCubin(const std::string& key, std::string image);

bool HasCubin(const std::string& key);

// The directory of the cubin store (runtime/store.py), which holds
// cubin/<arch>/<key>.cubin; empty for none.
void SetCubinDirectory(std::string directory);

struct CubinQuery {
  std::string_view key;       // lower-case hexadecimal
  std::string_view arch;      // such as "sm_90a"
  std::string_view entry;     // for messages
  std::string_view embedded;  // base64 of the image, or empty
};

// Process registry, then store, then the embedded copy, else FAILED_PRECONDITION.
ffi::Error ResolveCubin(const CubinQuery& query, Image* image);

}  // namespace tracea
