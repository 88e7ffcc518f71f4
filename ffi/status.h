// Error plumbing shared by the handlers. Every failure is an ffi::Error with a sentence.
#pragma once

#include <exception>
#include <string>
#include <utility>

#include "xla/ffi/api/ffi.h"

// Returns from the enclosing function when `expr`, an ffi::Error, is a failure.
#define TRACEA_RETURN_IF_ERROR(expr)                       \
  do {                                                     \
    if (::xla::ffi::Error error_ = (expr); error_.failure()) \
      return error_;                                       \
  } while (0)

namespace tracea {

namespace ffi = ::xla::ffi;

inline ffi::Error FailedPrecondition(std::string message) {
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition, std::move(message));
}

// Runs `body`, a function returning ffi::Error. XLA calls handlers through a C interface,
// so no exception may leave them.
template <typename Body>
ffi::Error Guarded(Body&& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("tracea: unexpected failure: ") +
                                error.what() + ".");
  } catch (...) {
    return ffi::Error::Internal("tracea: unexpected failure of unknown type.");
  }
}

}  // namespace tracea
