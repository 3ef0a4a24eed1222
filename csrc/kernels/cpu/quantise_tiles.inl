// Codes of 8 bits under a common scale: the inner loops of block-wise quantisation (block_quantise.h). Included once per
// instruction set, after float_formats.inl; the rules of tile_kernels.inl hold.

namespace {

u32 amax(const void* src, std_size numel) {
  auto* bits = static_cast<const u32*>(src);
  u32 most = 0;
  for (std_size i = 0; i < numel; ++i) {
    const u32 magnitude = bits[i] & 0x7fffffff;
    most = magnitude > most ? magnitude : most;
  }
  return most;
}

struct Int8Code {
  // -128 is not used, so that codes are symmetric. Adding 1.5 * 2^23 leaves the integer, rounded to nearest even, in the low bits.
  static u8 from_float_saturating(float x) {
    const float low = x < -127.0f ? -127.0f : x;
    const float number = low > 127.0f ? 127.0f : low;
    return static_cast<u8>(bits_of(number + 0x1.8p23f) - bits_of(0x1.8p23f));
  }
  static float to_float(u8 x) { return static_cast<float>(static_cast<i8>(x)); }
};

template <class Code>
void quantise(void* codes, const void* src, float scale, std_size numel) {
  auto* out = static_cast<u8*>(codes);
  auto* in = static_cast<const float*>(src);
#pragma GCC ivdep
  for (std_size i = 0; i < numel; ++i) out[i] = Code::from_float_saturating(in[i] / scale);
}

template <class Code>
void dequantise(void* dst, const void* codes, float scale, std_size numel) {
  auto* out = static_cast<float*>(dst);
  auto* in = static_cast<const u8*>(codes);
#pragma GCC ivdep
  for (std_size i = 0; i < numel; ++i) out[i] = Code::to_float(in[i]) * scale;
}

template <class Format>
void saturate(void* dst, const void* src, std_size numel) {
  auto* out = static_cast<u8*>(dst);
  auto* in = static_cast<const float*>(src);
#pragma GCC ivdep
  for (std_size i = 0; i < numel; ++i) out[i] = Format::from_float_saturating(in[i]);
}

template <class Code>
void fill_code(TileKernels* table, DType dtype) {
  table->quantise[static_cast<int>(dtype)] = quantise<Code>;
  table->dequantise[static_cast<int>(dtype)] = dequantise<Code>;
}

void fill_quantisation(TileKernels* table) {
  table->amax = amax;
  fill_code<E4M3FN>(table, DType::kFloat8E4M3FN);
  fill_code<E5M2>(table, DType::kFloat8E5M2);
  fill_code<Int8Code>(table, DType::kInt8);
  table->saturate[static_cast<int>(DType::kFloat8E4M3FN)] = saturate<E4M3FN>;
  table->saturate[static_cast<int>(DType::kFloat8E5M2)] = saturate<E5M2>;
}

}  // namespace
