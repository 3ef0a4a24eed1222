// One transfer with one instruction set. Included by roofline_sweep.cpp in a namespace that has `kVectorBytes` and
// `stream(float*, Vector)`, a store past the caches, and `drain()`, after which such stores are done.

// kSources and kDestinations: how many there are, or 0 for any number.
template <int kSources, int kDestinations, bool kStream>
void sweep_vectors(std::byte* const* sources, size_t num_sources, std::byte* const* destinations,
                   size_t num_destinations, size_t numel) {
  constexpr size_t kLanes = kVectorBytes / sizeof(float), kUnroll = 4;
  const size_t n = kSources ? kSources : num_sources;
  const size_t m = kDestinations ? kDestinations : num_destinations;
  const auto at = [](std::byte* base, size_t i) { return reinterpret_cast<float*>(base) + i; };
  size_t i = 0;
  for (; i + kUnroll * kLanes <= numel; i += kUnroll * kLanes) {
    Vector sum[kUnroll];
    for (size_t u = 0; u < kUnroll; ++u) {
      __builtin_memcpy(&sum[u], at(sources[0], i + u * kLanes), sizeof(Vector));
    }
    for (size_t s = 1; s < n; ++s) {
      for (size_t u = 0; u < kUnroll; ++u) {
        Vector term;
        __builtin_memcpy(&term, at(sources[s], i + u * kLanes), sizeof(Vector));
        sum[u] += term;
      }
    }
    for (size_t d = 0; d < m; ++d) {
      for (size_t u = 0; u < kUnroll; ++u) {
        float* const to = at(destinations[d], i + u * kLanes);
        if constexpr (kStream) {
          stream(to, sum[u]);
        } else {
          __builtin_memcpy(to, &sum[u], sizeof(Vector));
        }
      }
    }
  }
  for (; i < numel; ++i) {
    float sum = *at(sources[0], i);
    for (size_t s = 1; s < n; ++s) sum += *at(sources[s], i);
    for (size_t d = 0; d < m; ++d) *at(destinations[d], i) = sum;
  }
}

template <int kSources, int kDestinations>
void sweep_store(std::byte* const* sources, size_t n, std::byte* const* destinations, size_t m,
                 size_t numel, Store store) {
  if (store == Store::kNonTemporal) {
    sweep_vectors<kSources, kDestinations, true>(sources, n, destinations, m, numel);
    drain();
  } else {
    sweep_vectors<kSources, kDestinations, false>(sources, n, destinations, m, numel);
  }
}

void sweep(std::byte* mapping, const Transfer& transfer, Store store) {
  const size_t n = transfer.sources.size(), m = transfer.destinations.size();
  std::byte *sources[kMostOperands], *destinations[kMostOperands];
  for (size_t s = 0; s < n; ++s) sources[s] = mapping + transfer.sources[s];
  for (size_t d = 0; d < m; ++d) destinations[d] = mapping + transfer.destinations[d];
  const size_t numel = transfer.nbytes / sizeof(float);
  if (n == 1 && m == 1) {
    sweep_store<1, 1>(sources, n, destinations, m, numel, store);
  } else if (n == 2 && m == 2) {
    sweep_store<2, 2>(sources, n, destinations, m, numel, store);
  } else if (n == 2 && m == 1) {
    sweep_store<2, 1>(sources, n, destinations, m, numel, store);
  } else {
    sweep_store<0, 0>(sources, n, destinations, m, numel, store);
  }
  // A tail of less than an element.
  const size_t done = numel * sizeof(float);
  for (size_t d = 0; d < m; ++d) {
    std::memcpy(destinations[d] + done, sources[0] + done, transfer.nbytes - done);
  }
}
