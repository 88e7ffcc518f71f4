// Failures inside of the library: a status and a sentence, thrown to the C interface.

#ifndef TRACEA_KERNELS_CAPI_FAILURE_H_
#define TRACEA_KERNELS_CAPI_FAILURE_H_

#include <locale>
#include <sstream>
#include <stdexcept>
#include <string>

#include "tracea.h"

namespace tracea::capi {

struct Failure : std::runtime_error {
  Failure(tracea_status which, const std::string& sentence)
      : std::runtime_error(sentence), status(which) {}
  tracea_status status;
};

// For text with numbers as in C, whatever locale the program has set.
inline std::ostringstream PlainText() {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  return text;
}

template <typename... Parts>
[[noreturn]] void Fail(tracea_status status, const Parts&... parts) {
  std::ostringstream text = PlainText();
  (text << ... << parts);
  throw Failure(status, text.str());
}

}  // namespace tracea::capi

#endif  // TRACEA_KERNELS_CAPI_FAILURE_H_
