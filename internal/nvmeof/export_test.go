package nvmeof

// WithExtendedKV makes t the table of a host that was granted extended key-value.
func (t *NamespaceTable) WithExtendedKV() *NamespaceTable {
	t.extendedKV = true
	return t
}
