// Reading an image from the cubin store (runtime/cubins.py), trusting nobody but the user
// and root.
#pragma once

#include <string>
#include <string_view>

namespace tracea {

inline constexpr size_t kMaxCubinBytes = size_t{256} << 20;

// <directory>/cubin/<arch>/<key>.cubin
std::string CubinPath(const std::string& directory, std::string_view arch,
                      std::string_view key);

// Reads that file. It and its directories must belong to the user or to root and be
// writable by nobody else; below `directory` there may be no symbolic links; the file must
// be regular and of at most kMaxCubinBytes. Returns what is wrong, as a clause about the
// store, or nothing. Never blocks.
std::string ReadCubin(const std::string& directory, std::string_view arch,
                      std::string_view key, std::string* bytes);

}  // namespace tracea
