// Failures inside of the library: a status and a sentence, thrown to the C interface.

#ifndef TRACEA_KERNELS_CAPI_FAILURE_H_
#define TRACEA_KERNELS_CAPI_FAILURE_H_

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

template <typename... Parts>
[[noreturn]] void Fail(tracea_status status, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Failure(status, text.str());
}

}  // namespace tracea::capi

#endif  // TRACEA_KERNELS_CAPI_FAILURE_H_
