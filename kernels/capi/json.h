// JSON (RFC 8259), as far as manifests need it: read only, whole numbers kept exact.

#ifndef TRACEA_KERNELS_CAPI_JSON_H_
#define TRACEA_KERNELS_CAPI_JSON_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace tracea::capi {

class Json {
 public:
  using List = std::vector<Json>;
  using Object = std::map<std::string, Json, std::less<>>;

  // Throws Failure (TRACEA_INVALID), saying where the text is no JSON.
  static Json Parse(std::string_view text);

  // Each throws Failure (TRACEA_INVALID) naming `what` if the value is of another kind.
  bool AsBool(std::string_view what) const;
  int64_t AsInt(std::string_view what) const;
  const std::string& AsText(std::string_view what) const;
  const List& AsList(std::string_view what) const;
  const Object& AsObject(std::string_view what) const;
  std::vector<int64_t> AsInts(std::string_view what) const;

  // A member of an object that must have it.
  const Json& operator[](std::string_view name) const;

  // False if the value is of another kind; a whole number is a double too.
  bool Get(bool* value) const;
  bool Get(int64_t* value) const;
  bool Get(double* value) const;
  bool Get(std::string_view* value) const;

 private:
  friend class Parser;
  std::variant<std::monostate, bool, int64_t, double, std::string, List, Object> value_;
};

}  // namespace tracea::capi

#endif  // TRACEA_KERNELS_CAPI_JSON_H_
