// The files of a bundle, each checked against its SHA-256.

#ifndef TRACEA_KERNELS_CAPI_FILES_H_
#define TRACEA_KERNELS_CAPI_FILES_H_

#include <map>
#include <string>

namespace tracea::capi {

// The contents of all files that the bundle's SHA256SUMS lists, by their names in it.
//
// Throws Failure: TRACEA_CPU_ERROR if a file cannot be read, TRACEA_INVALID if one is
// missing or is not what it was when the bundle was written.
std::map<std::string, std::string> ReadBundle(const std::string& path);

}  // namespace tracea::capi

#endif  // TRACEA_KERNELS_CAPI_FILES_H_
