/* e^x within 2 units in the last place: 2^n * e^r with |r| <= ln 2 / 2, a Taylor polynomial of degree 7. */
static inline Vector exponential(Vector x) {
    x = larger_of(all(-104), smaller(all(104), x)); /* beyond: 0 and infinity */
    const Vector n = to_integers(times(x, all(1.44269504f)));
    Vector r = minus_times(x, n, all(0.693359375f));
    r = minus_times(r, n, all(-2.12194440e-4f));
    Vector sum = all(1.0f / 5040);
    static const float REST[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    for (int i = 0; i < 7; i++) sum = times_plus(sum, r, all(REST[i]));
    return times_two_to(sum, n);
}
