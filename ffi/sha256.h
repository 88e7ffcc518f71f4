// SHA-256 (FIPS 180-4), by which images are known.
#pragma once

#include <string>
#include <string_view>

namespace tracea {

// The digest as 64 lower-case hexadecimal digits.
std::string Sha256(std::string_view bytes);

}  // namespace tracea
