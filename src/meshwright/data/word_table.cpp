// Texts as numbers of their words, and words as ids (see word_table.py).
//
// Texts are UTF-8. A unit of ASCII is split by the rule of GPT-2 or by that of Llama 3 and Qwen 2; any other unit is
// one word. Functions return counts, and pointers to memory that is valid until the next call.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace {

using std::string_view;

// Classes of characters of ASCII. Bytes from 0x80 on are none of these.
enum Class : uint8_t { OTHER, LETTER, DIGIT, SPACE, NEWLINE };

constexpr auto CLASSES = [] {
  struct {
    Class of[256] = {};
  } classes;
  for (int i = 'a'; i <= 'z'; ++i) classes.of[i] = classes.of[i - 'a' + 'A'] = LETTER;
  for (int i = '0'; i <= '9'; ++i) classes.of[i] = DIGIT;
  for (int i = '\t'; i <= '\r'; ++i) classes.of[i] = SPACE;
  classes.of[' '] = SPACE;
  classes.of['\n'] = classes.of['\r'] = NEWLINE;
  return classes;
}();

Class class_of(char c) { return CLASSES.of[static_cast<uint8_t>(c)]; }
bool is_space(char c) { return class_of(c) >= SPACE; }

// Bytes of the character of Unicode's White_Space that begins at `from`, 0 for another character.
int64_t space_at(string_view text, size_t from) {
  const uint8_t first = text[from];
  if (first < 0x80) return is_space(text[from]);
  const auto starts = [&](string_view spelled) { return text.substr(from, spelled.size()) == spelled; };
  if (first == 0xc2) return starts("\xc2\x85") || starts("\xc2\xa0") ? 2 : 0;
  if (first == 0xe1) return starts("\xe1\x9a\x80") ? 3 : 0;
  if (first == 0xe3) return starts("\xe3\x80\x80") ? 3 : 0;
  if (first != 0xe2 || from + 2 >= text.size()) return 0;
  const uint8_t last = text[from + 2];
  const bool general = last <= 0x8a || last == 0xa8 || last == 0xa9 || last == 0xaf;
  return (starts("\xe2\x80") && general) || starts("\xe2\x81\x9f") ? 3 : 0;
}

size_t after_spaces(string_view text, size_t from) {
  while (from < text.size()) {
    const int64_t bytes = space_at(text, from);
    if (!bytes) break;
    from += bytes;
  }
  return from;
}

size_t after_visible(string_view text, size_t from) {
  while (from < text.size() && !space_at(text, from)) ++from;
  return from;
}

// The end of the first unit of `text`.
size_t unit_end(string_view text, bool joins_lines) {
  size_t at = after_visible(text, after_spaces(text, 0));
  while (joins_lines && at < text.size() && class_of(text[at]) == NEWLINE && class_of(text[at - 1]) != LETTER &&
         class_of(text[at - 1]) != DIGIT)
    at = after_visible(text, after_spaces(text, at + 1));
  return at;
}

// How many bytes of ASCII `text` begins with.
size_t ascii_bytes(string_view text) {
  size_t at = 0;
  for (uint64_t eight; at + sizeof(eight) <= text.size(); at += sizeof(eight)) {
    std::memcpy(&eight, text.data() + at, sizeof(eight));
    if (eight & 0x8080808080808080) break;
  }
  while (at < text.size() && static_cast<uint8_t>(text[at]) < 0x80) ++at;
  return at;
}

// Where the last unit ends that is among the first `ascii` bytes of `text`.
size_t whole_units(string_view text, size_t ascii, bool joins_lines) {
  if (ascii == text.size()) return ascii;
  for (size_t at = ascii; at-- > 1;) {
    const Class before = class_of(text[at - 1]), after = class_of(text[at]);
    const bool joined = joins_lines && after == NEWLINE && before == OTHER;
    if (before < SPACE && after >= SPACE && !joined) return at;
  }
  return 0;
}

// The end of the first word of `text`, which is ASCII. `most_digits` is the rule: 0 for GPT-2's, in which words have
// any number of digits, and otherwise that of Llama 3 and Qwen 2.
class Splitter {
 public:
  Splitter(string_view text, int64_t most_digits) : text_(text), most_digits_(most_digits) {}

  size_t end() const {
    const bool later = most_digits_ > 0;
    if (const size_t bytes = contraction(later)) return bytes;
    const Class first = class_of(text_[0]), second = text_.size() > 1 ? class_of(text_[1]) : SPACE;
    const bool spaced = text_[0] == ' ';
    if (first == LETTER) return run(LETTER, 0);
    if (second == LETTER && (spaced || (later && first != DIGIT && first != NEWLINE))) return run(LETTER, 1);
    if (first == DIGIT) return later ? std::min<size_t>(run(DIGIT, 0), most_digits_) : run(DIGIT, 0);
    if (second == DIGIT && spaced && !later) return run(DIGIT, 1);
    if (first == OTHER || (second == OTHER && spaced)) {
      const size_t at = run(OTHER, spaced);
      return later ? run(NEWLINE, at) : at;
    }
    return spaces(later);
  }

 private:
  // 's, 't, 're, 've, 'm, 'll or 'd, in `any_case` in capitals too: their bytes, or 0.
  size_t contraction(bool any_case) const {
    if (text_[0] != '\'') return 0;
    for (const string_view each : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}) {
      size_t same = 1;
      while (same < std::min(each.size(), text_.size()) &&
             (text_[same] == each[same] || (any_case && (text_[same] | 0x20) == each[same])))
        ++same;
      if (same == each.size()) return same;
    }
    return 0;
  }

  size_t run(Class kind, size_t from) const {
    while (from < text_.size() && class_of(text_[from]) == kind) ++from;
    return from;
  }

  // A run of spaces: up to its last newline if words hold newlines, or without its last space before a word.
  size_t spaces(bool later) const {
    size_t at = 0, newlines = 0;
    for (; at < text_.size() && is_space(text_[at]); ++at)
      if (class_of(text_[at]) == NEWLINE) newlines = at + 1;
    if (later && newlines) return newlines;
    return at < text_.size() && at > 1 ? at - 1 : at;
  }

  string_view text_;
  int64_t most_digits_;
};

constexpr size_t HEAD = 8;  // bytes after a text that may be read

// Numbers of texts, in the order in which they came up.
class Numbers {
 public:
  // `text` has HEAD bytes after it.
  uint32_t operator[](string_view text) {
    if (2 * (ends_.size() + 1) > slots_.size()) grow();
    const uint64_t first = head(text);
    size_t at = hash(first, text) & (slots_.size() - 1);
    for (; slots_[at].next; at = (at + 1) & (slots_.size() - 1)) {
      const Slot& slot = slots_[at];
      if (slot.head == first && slot.bytes == text.size() && (text.size() <= HEAD || spelled(slot.next - 1) == text))
        return slot.next - 1;
    }
    letters_.append(text);
    ends_.push_back(letters_.size());
    slots_[at] = {first, static_cast<uint32_t>(text.size()), static_cast<uint32_t>(ends_.size())};
    return slots_[at].next - 1;
  }

  int64_t bytes() const { return letters_.size() + ends_.size() * sizeof(int64_t) + slots_.size() * sizeof(Slot); }
  const std::string& letters() const { return letters_; }
  const std::vector<int64_t>& ends() const { return ends_; }

 private:
  struct Slot {
    uint64_t head;
    uint32_t bytes, next;  // the number that follows; 0 in empty slots
  };

  static uint64_t head(string_view text) {
    uint64_t first;
    std::memcpy(&first, text.data(), HEAD);
    return text.size() < HEAD ? first & ((uint64_t{1} << (8 * text.size())) - 1) : first;
  }

  static uint64_t mixed(uint64_t a, uint64_t b) {
    const auto product = static_cast<unsigned __int128>(a ^ 0x9e3779b97f4a7c15) * (b ^ 0xc2b2ae3d27d4eb4f);
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  }

  static uint64_t hash(uint64_t first, string_view text) {
    uint64_t sum = mixed(first, text.size());
    for (size_t at = HEAD; at < text.size(); at += HEAD) {
      uint64_t part = 0;
      std::memcpy(&part, text.data() + at, std::min(HEAD, text.size() - at));
      sum = mixed(sum, part);
    }
    return sum;
  }

  string_view spelled(uint32_t number) const {
    const int64_t start = number ? ends_[number - 1] : 0;
    return string_view(letters_).substr(start, ends_[number] - start);
  }

  void grow() {
    std::vector<Slot> larger(std::max<size_t>(1024, 2 * slots_.size()));
    for (const Slot& slot : slots_) {
      if (!slot.next) continue;
      size_t at = hash(slot.head, spelled(slot.next - 1)) & (larger.size() - 1);
      while (larger[at].next) at = (at + 1) & (larger.size() - 1);
      larger[at] = slot;
    }
    slots_.swap(larger);
  }

  std::string letters_;
  std::vector<int64_t> ends_;
  std::vector<Slot> slots_;
};

struct Table {
  Table(bool joins_lines, int64_t most_digits) : joins_lines(joins_lines), most_digits(most_digits) {}

  const bool joins_lines;
  const int64_t most_digits;
  Numbers numbers;
  std::string ids;                     // of the first words, one after another
  std::vector<int64_t> id_ends = {0};  // in bytes
  std::string found;                   // ids that were asked for
  std::string text;
};

}  // namespace

extern "C" {

void* word_table_new(int64_t joins_lines, int64_t most_digits) { return new Table(joins_lines != 0, most_digits); }

void word_table_free(void* table) { delete static_cast<Table*>(table); }

// The numbers of a text's words go to `numbers`, which has room for `bytes`.
int64_t word_table_numbers(void* table, const char* letters, int64_t bytes, uint32_t* numbers) {
  auto& self = *static_cast<Table*>(table);
  self.text.assign(letters, bytes).append(HEAD, '\0');
  string_view text(self.text.data(), bytes);
  const uint32_t* const first = numbers;
  while (!text.empty()) {
    const size_t ascii = ascii_bytes(text);
    size_t size = whole_units(text, ascii, self.joins_lines);
    if (!size) size = unit_end(text, self.joins_lines);
    for (string_view rest = text.substr(0, size); !rest.empty();) {
      const size_t end = size <= ascii ? Splitter(rest, self.most_digits).end() : size;
      *numbers++ = self.numbers[rest.substr(0, end)];
      rest.remove_prefix(end);
    }
    text.remove_prefix(size);
  }
  return numbers - first;
}

int64_t word_table_known_bytes(void* table) { return static_cast<Table*>(table)->numbers.bytes(); }

// All words so far, one after another, and where each ends.
int64_t word_table_words(void* table, const char** letters, const int64_t** ends) {
  const auto& numbers = static_cast<Table*>(table)->numbers;
  *letters = numbers.letters().data();
  *ends = numbers.ends().data();
  return numbers.ends().size();
}

int64_t word_table_forget_ids(void* table) {
  auto& self = *static_cast<Table*>(table);
  self.ids.clear();
  self.id_ends.resize(1);
  return 0;
}

// The ids of the next words end at these of `bytes`.
int64_t word_table_add_ids(void* table, int64_t words, const int64_t* ends, int64_t bytes, const char* ids) {
  auto& self = *static_cast<Table*>(table);
  for (int64_t i = 0; i < words; ++i) self.id_ends.push_back(self.ids.size() + ends[i]);
  self.ids.append(ids, bytes);
  return words;
}

// The ids of words, one after another; returns how many bytes they take.
int64_t word_table_ids(void* table, const uint32_t* numbers, int64_t count, const char** ids) {
  auto& self = *static_cast<Table*>(table);
  int64_t bytes = 0;
  for (int64_t i = 0; i < count; ++i) bytes += self.id_ends[numbers[i] + 1] - self.id_ends[numbers[i]];
  self.found.resize(bytes);
  char* to = self.found.data();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t start = self.id_ends[numbers[i]], end = self.id_ends[numbers[i] + 1];
    to = std::copy(self.ids.data() + start, self.ids.data() + end, to);
  }
  *ids = self.found.data();
  return bytes;
}
}
