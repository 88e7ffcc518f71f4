#include "json.h"

#include <cerrno>
#include <clocale>
#include <cstdlib>
#include <utility>

#include "failure.h"

namespace tracea::capi {

constexpr int kMostDepth = 64;

// As in C, whatever locale the program has set.
double ParseDouble(const char* digits, char** stop) {
  static const locale_t plain = newlocale(LC_ALL_MASK, "C", nullptr);
  return plain ? strtod_l(digits, stop, plain) : std::strtod(digits, stop);
}

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Json Whole() {
    Json value = Value(0);
    Space();
    if (at_ != text_.size()) Wrong("something follows the value");
    return value;
  }

 private:
  [[noreturn]] void Wrong(const char* why) const {
    Fail(TRACEA_INVALID, "it is no JSON: ", why, " at byte ", at_);
  }

  void Space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' ||
                                  text_[at_] == '\t' || text_[at_] == '\r')) {
      ++at_;
    }
  }

  char Peek() {
    Space();
    if (at_ == text_.size()) Wrong("it ends too early");
    return text_[at_];
  }

  bool Take(char c) {
    if (Peek() != c) return false;
    ++at_;
    return true;
  }

  void Expect(char c, const char* why) {
    if (!Take(c)) Wrong(why);
  }

  bool TakeWord(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  Json Value(int depth) {
    if (depth > kMostDepth) Wrong("values are nested too deep");
    Json json;
    switch (Peek()) {
      case '{':
        json.value_ = Members(depth);
        break;
      case '[':
        json.value_ = Items(depth);
        break;
      case '"':
        json.value_ = Text();
        break;
      default:
        if (TakeWord("true")) {
          json.value_ = true;
        } else if (TakeWord("false")) {
          json.value_ = false;
        } else if (!TakeWord("null")) {
          Number(&json);
        }
    }
    return json;
  }

  Json::Object Members(int depth) {
    Json::Object object;
    Expect('{', "an object must begin");
    if (Take('}')) return object;
    do {
      if (Peek() != '"') Wrong("a name must follow");
      std::string name = Text();
      Expect(':', "':' must follow a name");
      object[std::move(name)] = Value(depth + 1);
    } while (Take(','));
    Expect('}', "',' or '}' must follow a member");
    return object;
  }

  Json::List Items(int depth) {
    Json::List list;
    Expect('[', "a list must begin");
    if (Take(']')) return list;
    do {
      list.push_back(Value(depth + 1));
    } while (Take(','));
    Expect(']', "',' or ']' must follow an item");
    return list;
  }

  std::string Text() {
    std::string text;
    Expect('"', "a text must begin");
    for (;;) {
      if (at_ == text_.size()) Wrong("a text does not end");
      const char c = text_[at_++];
      if (c == '"') return text;
      if (static_cast<unsigned char>(c) < 0x20) Wrong("a text has a control character");
      text += c == '\\' ? Escaped() : std::string(1, c);
    }
  }

  std::string Escaped() {
    if (at_ == text_.size()) Wrong("a text does not end");
    const char c = text_[at_++];
    constexpr std::string_view kFrom = "\"\\/bfnrt", kTo = "\"\\/\b\f\n\r\t";
    if (const size_t i = kFrom.find(c); i != kFrom.npos) return std::string(1, kTo[i]);
    if (c != 'u') Wrong("a text has an unknown escape");
    return Utf8(CodePoint());
  }

  uint32_t CodePoint() {
    const uint32_t first = Hex4();
    if (first < 0xd800 || first >= 0xe000) return first;
    if (first >= 0xdc00 || !TakeWord("\\u")) Wrong("a text has half a surrogate pair");
    const uint32_t second = Hex4();
    if (second < 0xdc00 || second >= 0xe000) Wrong("a text has half a surrogate pair");
    return 0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00);
  }

  uint32_t Hex4() {
    uint32_t value = 0;
    for (int i = 0; i < 4; ++i) {
      constexpr std::string_view kDigits = "0123456789abcdef";
      const char c = at_ < text_.size() ? text_[at_++] : ' ';
      const char lower = c >= 'A' && c <= 'F' ? static_cast<char>(c - 'A' + 'a') : c;
      const size_t digit = kDigits.find(lower);
      if (digit == kDigits.npos) Wrong("\\u needs four hexadecimal digits");
      value = value * 16 + static_cast<uint32_t>(digit);
    }
    return value;
  }

  static std::string Utf8(uint32_t code) {
    const auto tail = [&](int shift) {
      return static_cast<char>(0x80 | ((code >> shift) & 0x3f));
    };
    if (code < 0x80) return {static_cast<char>(code)};
    if (code < 0x800) return {static_cast<char>(0xc0 | code >> 6), tail(0)};
    if (code < 0x10000) return {static_cast<char>(0xe0 | code >> 12), tail(6), tail(0)};
    return {static_cast<char>(0xf0 | code >> 18), tail(12), tail(6), tail(0)};
  }

  void Number(Json* json) {
    const size_t end = text_.find_first_not_of("+-.0123456789eE", at_);
    const std::string digits(text_.substr(at_, end == text_.npos ? end : end - at_));
    char* stop = nullptr;
    errno = 0;
    if (digits.find_first_of(".eE") == digits.npos) {
      json->value_ = static_cast<int64_t>(std::strtoll(digits.c_str(), &stop, 10));
    } else {
      json->value_ = ParseDouble(digits.c_str(), &stop);
    }
    if (digits.empty() || *stop != '\0' || errno != 0) Wrong("a value must follow");
    at_ += digits.size();
  }

  std::string_view text_;
  size_t at_ = 0;
};

Json Json::Parse(std::string_view text) { return Parser(text).Whole(); }

namespace {

template <typename T, typename Value>
const T& As(const Value& value, std::string_view what, const char* kind) {
  if (const T* found = std::get_if<T>(&value)) return *found;
  Fail(TRACEA_INVALID, what, " is no ", kind);
}

template <typename T, typename Value>
bool GetAs(const Value& value, T* result) {
  const T* found = std::get_if<T>(&value);
  if (found) *result = *found;
  return found != nullptr;
}

}  // namespace

bool Json::AsBool(std::string_view what) const {
  return As<bool>(value_, what, "truth value");
}
int64_t Json::AsInt(std::string_view what) const {
  return As<int64_t>(value_, what, "whole number");
}
const std::string& Json::AsText(std::string_view what) const {
  return As<std::string>(value_, what, "text");
}
const Json::List& Json::AsList(std::string_view what) const {
  return As<List>(value_, what, "list");
}
const Json::Object& Json::AsObject(std::string_view what) const {
  return As<Object>(value_, what, "object");
}

std::vector<int64_t> Json::AsInts(std::string_view what) const {
  std::vector<int64_t> numbers;
  for (const Json& item : AsList(what)) numbers.push_back(item.AsInt(what));
  return numbers;
}

const Json& Json::operator[](std::string_view name) const {
  const Object& object = AsObject("what should have members");
  const auto found = object.find(name);
  if (found == object.end()) Fail(TRACEA_INVALID, "\"", name, "\" is missing");
  return found->second;
}

bool Json::Get(bool* value) const { return GetAs(value_, value); }
bool Json::Get(int64_t* value) const { return GetAs(value_, value); }
bool Json::Get(double* value) const {
  if (const int64_t* whole = std::get_if<int64_t>(&value_)) {
    *value = static_cast<double>(*whole);
    return true;
  }
  return GetAs(value_, value);
}
bool Json::Get(std::string_view* value) const {
  const std::string* found = std::get_if<std::string>(&value_);
  if (found) *value = *found;
  return found != nullptr;
}

}  // namespace tracea::capi
