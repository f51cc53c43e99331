package nvmeof

// WithExtendedKV makes t the table of a host that was granted extended key-value.
func (t *NamespaceTable) WithExtendedKV() *NamespaceTable {
	t.extendedKV = true
	return t
}

// WithReplication makes t the table of a node that was granted replication.
func (t *NamespaceTable) WithReplication() *NamespaceTable {
	t.replication = true
	return t
}
