// From XLA's call of a CPU handler to calls of kernels, which know no XLA.
//
// Handlers are stateless. They run on XLA's thread pool and on the calling thread.

#ifndef TRACEA_FFI_CPU_CALL_H_
#define TRACEA_FFI_CPU_CALL_H_

#include <array>
#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include "calls/call.h"
#include "xla/ffi/api/ffi.h"

namespace tracea {

inline constexpr size_t kMostArrays = 16;  // on a handler's stack

class XlaAttributes final : public Attributes {
 public:
  explicit XlaAttributes(const xla::ffi::Dictionary& attrs) : attrs_(attrs) {}

  bool Find(std::string_view name, bool* value) const override { return Get(name, value); }
  bool Find(std::string_view name, int64_t* value) const override {
    return Get(name, value);
  }
  bool Find(std::string_view name, double* value) const override {
    return Get(name, value);
  }
  bool Find(std::string_view name, std::string_view* value) const override {
    return Get(name, value);
  }

 private:
  template <typename T>
  bool Get(std::string_view name, T* value) const {
    xla::ffi::ErrorOr<T> found = attrs_.get<T>(name);
    if (found.has_error()) return false;
    *value = *found;
    return true;
  }

  const xla::ffi::Dictionary& attrs_;
};

class XlaPool final : public Pool {
 public:
  explicit XlaPool(xla::ffi::ThreadPool& pool) : pool_(pool) {}

  int64_t num_threads() const override { return pool_.num_threads(); }
  void Schedule(std::function<void()> work) override { pool_.Schedule(std::move(work)); }

 private:
  xla::ffi::ThreadPool& pool_;
};

inline ArrayType ArrayTypeOf(xla::ffi::DataType type) {
  switch (type) {
    case xla::ffi::DataType::F32:
      return ArrayType::kF32;
    case xla::ffi::DataType::BF16:
      return ArrayType::kBF16;
    case xla::ffi::DataType::F16:
      return ArrayType::kF16;
    case xla::ffi::DataType::F64:
      return ArrayType::kF64;
    case xla::ffi::DataType::C64:
      return ArrayType::kC64;
    case xla::ffi::DataType::C128:
      return ArrayType::kC128;
    case xla::ffi::DataType::PRED:
      return ArrayType::kPred;
    case xla::ffi::DataType::S32:
      return ArrayType::kS32;
    default:
      return ArrayType::kOther;
  }
}

inline Array ArrayOf(const xla::ffi::AnyBuffer& buffer) {
  const auto dims = buffer.dimensions();
  return {buffer.untyped_data(), ArrayTypeOf(buffer.element_type()),
          {dims.begin(), dims.size()}};
}

// A handler: parses the attributes, and runs the call with the arrays.
template <typename Options>
xla::ffi::Error Handle(const char* handler, Options (*parse)(const Attributes&),
                       void (*run)(Pool&, const Options&, Arrays, Arrays),
                       xla::ffi::ThreadPool& pool, const xla::ffi::Dictionary& attrs,
                       const xla::ffi::RemainingArgs& args,
                       const xla::ffi::RemainingRets& rets) {
  const auto named = [&](const std::string& text) {
    return std::string(handler) + ": " + text;
  };
  try {
    std::array<Array, kMostArrays> operands, results;
    if (args.size() > kMostArrays || rets.size() > kMostArrays) {
      Refuse("got ", args.size(), " operands and ", rets.size(), " results; there are ",
             kMostArrays, " of each at most.");
    }
    for (size_t i = 0; i < args.size(); ++i) {
      operands[i] = ArrayOf(*args.get<xla::ffi::AnyBuffer>(i));
    }
    for (size_t i = 0; i < rets.size(); ++i) {
      results[i] = ArrayOf(**rets.get<xla::ffi::AnyBuffer>(i));
    }
    XlaPool threads(pool);
    run(threads, parse(XlaAttributes(attrs)), {operands.data(), args.size()},
        {results.data(), rets.size()});
    return xla::ffi::Error::Success();
  } catch (const InvalidCall& error) {
    return xla::ffi::Error::InvalidArgument(named(error.what()));
  } catch (const OutOfMemory& error) {
    return xla::ffi::Error(xla::ffi::ErrorCode::kResourceExhausted, named(error.what()));
  } catch (const std::exception& error) {
    return xla::ffi::Error::Internal(named(error.what()));
  }
}

}  // namespace tracea

// Defines the handler `symbol` of an operation's `parse` and `run`.
#define TRACEA_CPU_HANDLER(symbol, parse, run)                                        \
  static ::xla::ffi::Error symbol##_call(                                             \
      ::xla::ffi::ThreadPool pool, ::xla::ffi::Dictionary attrs,                      \
      ::xla::ffi::RemainingArgs args, ::xla::ffi::RemainingRets rets) {               \
    return ::tracea::Handle(#symbol, parse, run, pool, attrs, args, rets);            \
  }                                                                                   \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, symbol##_call,                                \
                                ::xla::ffi::Ffi::Bind()                               \
                                    .Ctx<::xla::ffi::ThreadPool>()                    \
                                    .Attrs()                                          \
                                    .RemainingArgs()                                  \
                                    .RemainingRets())

#endif  // TRACEA_FFI_CPU_CALL_H_
